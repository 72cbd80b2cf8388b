"""DiskAges: how long ago blocks had been written when the disk dropped them, by a sample."""

from collections.abc import Callable, Sequence

from kvtier.tiers.device.eviction_ages import AGES_S
from kvtier.tiers.histogram import Histogram, HistogramStatistics
from kvtier.tiers.naming.block_hash import BlockName

EVERY_S = 1.0
MOST_MARKERS = 4096


class DiskAges:
    """Remembers one block of those written in each second. When it is dropped, all that were dropped since the last
    one count as it. Blocks of an earlier process have no age. Owned by the tiers' thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ages = Histogram(AGES_S)
        self._written_at: dict[BlockName, float] = {}  # oldest first
        self._every_s = EVERY_S
        self._next_at = float("-inf")
        self._num_uncounted = 0

    def on_written(self, names: Sequence[BlockName]) -> None:
        """Take in that these blocks were written just now."""
        now = self._clock()
        if not names or now < self._next_at:
            return
        self._next_at = now + self._every_s
        self._written_at.pop(names[-1], None)
        self._written_at[names[-1]] = now
        if len(self._written_at) > MOST_MARKERS:
            self._written_at = dict(list(self._written_at.items())[::2])
            self._every_s *= 2

    def on_dropped(self, name: BlockName) -> None:
        """Take in that the disk dropped this block to make room."""
        self._num_uncounted += 1
        if (written_at := self._written_at.pop(name, None)) is not None:
            self._ages.add(self._clock() - written_at, self._num_uncounted)
            self._num_uncounted = 0

    def statistics(self) -> HistogramStatistics:
        """The ages of the blocks that have been counted, in seconds."""
        return self._ages.statistics()
