"""EvictionAges: for how long blocks had not been used when their tier evicted them, by a sample."""

from collections import deque
from typing import NamedTuple

import numpy as np

from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.histogram import Histogram, HistogramStatistics

# A tier should hold about ten minutes of new KV (trace study): buckets are closest around that.
AGES_S = (1, 5, 15, 30, 60, 120, 300, 450, 600, 900, 1200, 1800, 3600, 7200, 21600, 86400)
EVERY_S = 0.25
MOST_MARKERS = 4096
NO_AGES = Histogram(AGES_S).statistics()


class Marker(NamedTuple):
    """The slot that had become free last, at a time: where it stood in the order, and which block it had."""

    slot: int
    place: int
    spot: int
    since: float


class EvictionAges:
    """Looks now and then which slot has just become free, and later how long its block stayed until it was evicted.

    A time noted for each slot at each release would cost every step; this costs the pool nothing. Blocks are evicted in
    the order in which they were used last, so those that go between two of these count as the later one. A block that
    is used again before is left out. Owned by the cache's thread.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._ages = Histogram(AGES_S)
        self._markers: deque[Marker] = deque()
        self._every_s = EVERY_S
        self._next_at = float("-inf")
        self._num_counted = 0  # of all evictions

    def look(self, num_evicted: int, now: float) -> None:
        """Count what has been evicted since the last call, *num_evicted* in all since the start; remember what is next.
        To be called often: most calls do nothing."""
        if now < self._next_at:
            return
        self._next_at = now + self._every_s
        self._count(num_evicted, now)
        slot = self._pool.order.newest()
        if slot is None or (self._markers and self._markers[-1].slot == slot):
            return
        place = self._pool.order.place(slot)
        assert place is not None, "the newest slot of the order has a place"
        self._markers.append(Marker(slot, place, self._spot(slot), now))
        if len(self._markers) > MOST_MARKERS:
            self._markers = deque(list(self._markers)[::2])
            self._every_s *= 2

    def statistics(self) -> HistogramStatistics:
        """The ages of the blocks that have been counted, in seconds."""
        return self._ages.statistics()

    def _count(self, num_evicted: int, now: float) -> None:
        evicted = []
        while self._markers:
            marker = self._markers[0]
            if self._pool.order.place(marker.slot) == marker.place:
                break
            self._markers.popleft()
            if self._spot(marker.slot) != marker.spot:  # else its block was used again
                evicted.append(now - marker.since)
        for number, age_s in enumerate(evicted):
            num_blocks = (num_evicted - self._num_counted) // (len(evicted) - number)
            self._ages.add(age_s, num_blocks)
            self._num_counted += num_blocks

    def _spot(self, slot: int) -> int:
        return int(self._pool.spots(np.array([slot], np.intp))[0])
