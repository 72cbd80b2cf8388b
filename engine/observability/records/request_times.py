"""RequestTimes: how long requests took, by the coldest tier that their tokens came from."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.tiers.histogram import Histogram, HistogramStatistics
from kvtier.tiers.naming.tier import Tier

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
NO_TIER = "none"  # all tokens were computed
COLDEST = (NO_TIER, *(tier.value for tier in Tier))


@dataclass(frozen=True, slots=True)
class TimesStatistics:
    """Histograms in seconds; of times to the first token by the coldest tier, or NO_TIER."""

    ttft: Mapping[str, HistogramStatistics]
    queue: HistogramStatistics
    lookup: HistogramStatistics
    load: HistogramStatistics


class RequestTimes:
    """Listens to records. Owned by the thread that records are made in."""

    def __init__(self) -> None:
        self._ttft = {coldest: Histogram(SECONDS) for coldest in COLDEST}
        self._queue, self._lookup, self._load = (Histogram(SECONDS) for _ in range(3))

    def on_record(self, record: RequestRecord) -> None:
        """Count a request that has ended, as far as it came."""
        own = self._ttft[NO_TIER if record.coldest is None else record.coldest.value]
        for histogram, seconds in (
            (own, record.ttft_s),
            (self._queue, record.queue_s),
            (self._lookup, record.lookup_s),
            (self._load, record.load_s),
        ):
            if seconds is not None:
                histogram.add(seconds)

    def statistics(self) -> TimesStatistics:
        """The counts now, by value."""
        return TimesStatistics(
            {coldest: each.statistics() for coldest, each in self._ttft.items()},
            self._queue.statistics(),
            self._lookup.statistics(),
            self._load.statistics(),
        )
