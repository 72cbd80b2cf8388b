"""RecentValues: what a histogram that only grows has counted lately."""

from collections import deque

from kvtier.tiers.histogram import HistogramStatistics

EVERY_S = 5.0


class RecentValues:
    """Keeps what a histogram was, every `EVERY_S` seconds over *window_s*, and tells what came since."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._kept: deque[tuple[float, HistogramStatistics]] = deque()

    def since(self, now_s: float, histogram: HistogramStatistics) -> HistogramStatistics:
        """The counts of the last *window_s*; of less, as long as less is known. By a clock that nobody sets."""
        kept = self._kept
        if not kept or now_s - kept[-1][0] >= EVERY_S:
            kept.append((now_s, histogram))
        while len(kept) > 1 and kept[1][0] <= now_s - self._window_s:
            kept.popleft()
        before = kept[0][1]
        counts = tuple(now - then for now, then in zip(histogram.counts, before.counts, strict=True))
        return HistogramStatistics(histogram.bounds, counts, histogram.total - before.total)


def quantile(histogram: HistogramStatistics, share: float) -> float | None:
    """The value that so large a *share* of the values is below, as far as buckets tell; None if there are none. What is
    above all bounds counts as the last of them."""
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
