"""Histogram: counts of observed values in buckets."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramStatistics:
    """Counts of values by bucket, and *total*, their sum. The last bucket counts the values above all *bounds*."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0

    @property
    def num_values(self) -> int:
        """Number of values counted."""
        return sum(self.counts)

    def plus(self, other: "HistogramStatistics") -> "HistogramStatistics":
        """Return the sum of this histogram and another one with the same bounds."""
        counts = tuple(own + theirs for own, theirs in zip(self.counts, other.counts, strict=True))
        return HistogramStatistics(self.bounds, counts, self.total + other.total)


class Histogram:
    """A histogram with the ascending upper bucket limits *bounds*, which are inclusive, as in Prometheus."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count *value* as if it had been observed *times* times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def statistics(self) -> HistogramStatistics:
        """Return a copy of the current counts."""
        return HistogramStatistics(self._bounds, tuple(self._counts), self._total)
