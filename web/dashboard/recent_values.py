"""Histograms of recent values, computed from a histogram of all values since the start."""

from collections import deque

from kvtier.tiers.histogram import HistogramStatistics

EVERY_S = 5.0


class RecentValues:
    """A histogram of the values of the last *window_s* seconds, computed from a histogram of all values.

    The histogram of all values is copied every `EVERY_S` seconds. The result is its current state minus the copy from
    the beginning of the window.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._kept: deque[tuple[float, HistogramStatistics]] = deque()

    def since(self, now_s: float, histogram: HistogramStatistics) -> HistogramStatistics:
        """Return the histogram of the last *window_s* seconds, or since the first call if that was later.

        *histogram* has all values up to now. *now_s* is a monotonic time.
        """
        kept = self._kept
        if not kept or now_s - kept[-1][0] >= EVERY_S:
            kept.append((now_s, histogram))
        while len(kept) > 1 and kept[1][0] <= now_s - self._window_s:
            kept.popleft()
        before = kept[0][1]
        counts = tuple(now - then for now, then in zip(histogram.counts, before.counts, strict=True))
        return HistogramStatistics(histogram.bounds, counts, histogram.total - before.total)


def quantile(histogram: HistogramStatistics, share: float) -> float | None:
    """Return the quantile for *share*, from 0 to 1, or None if there are no values. Interpolate within a bucket.

    A value above the last bound counts as equal to that bound.
    """
    left = share * histogram.num_values
    if not histogram.num_values:
        return None
    lower = 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        if count and left <= count:
            return lower + (bound - lower) * left / count
        left -= count
        lower = bound
    return histogram.bounds[-1]
