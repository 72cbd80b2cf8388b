"""Histogram: how often which values were seen, by buckets."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramStatistics:
    """Counts by bucket, the last one for what is above all *bounds*, and the sum of all values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0

    @property
    def num_values(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def plus(self, other: "HistogramStatistics") -> "HistogramStatistics":
        """The sum of this and another with the same bounds."""
        counts = tuple(own + theirs for own, theirs in zip(self.counts, other.counts, strict=True))
        return HistogramStatistics(self.bounds, counts, self.total + other.total)


class Histogram:
    """A value at a bound counts below it, as in Prometheus. *bounds* are the upper ends of the buckets, ascending."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count the value, that many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def statistics(self) -> HistogramStatistics:
        """The counts now, by value."""
        return HistogramStatistics(self._bounds, tuple(self._counts), self._total)
