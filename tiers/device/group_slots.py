"""GroupSlots: one attention group's slots on the device or in host memory, with dirty marks and eviction statistics.

A slot is *dirty* while its block has yet to be copied to a lower tier, and otherwise *clean*.
"""

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.device.cleared_blocks import ClearedBlocks
from kvtier.tiers.device.slot_ids import NOTHING, Ids, Slots
from kvtier.tiers.histogram import Histogram, HistogramStatistics
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import OwnerNumbers, number_of
from kvtier.tiers.naming.tier import EvictionCause

# A tier should hold about ten minutes of new KV (trace study), so the buckets are finest around that.
AGES_S = (1, 5, 15, 30, 60, 120, 300, 450, 600, 900, 1200, 1800, 3600, 7200, 21600, 86400)
EVERY_S = 0.25  # time between two markers of `EvictionAges`; doubled whenever there are too many markers
MAX_MARKERS = 4096
NO_AGES = Histogram(AGES_S).statistics()
MAX_ENTRIES = 4  # queue entries of `DirtyMarks` per slot; when the queue is longer, its oldest pieces are compacted
CLEAN = 0  # the mark of a slot that is not dirty; marks up to `DirtyMarks._clean` mean the same
NO_SPOT = -1  # not a spot: the number that identifies the named block in a slot, see `BlockPool.spots`

OnForgotten = Callable[[Ids, Sequence[BlockName], set[BlockName | None], EvictionCause], None]
"""Eviction callback: called with the slots, the names of their blocks, the names of the dirty ones, and the cause."""


class SlotOwners:
    """The tenant of each slot's block, initially `NO_TENANT`. Owned by the cache's thread."""

    def __init__(self, num_slots: int) -> None:
        self._numbers = np.zeros(num_slots, np.uint64)
        self._any_named = False  # whether any slot belongs to a tenant other than `NO_TENANT`

    def record(self, slots: Ids, tenant: bytes) -> None:
        """Record that *slots* hold blocks of *tenant*."""
        if not tenant and not self._any_named:
            return  # all slots belong to `NO_TENANT` already
        self._any_named = True
        self._numbers[slots] = number_of(tenant)

    def of(self, slots: Ids) -> OwnerNumbers:
        """Return the tenants of the blocks in *slots*."""
        return self._numbers[slots]


class Marker(NamedTuple):
    """A sample of `EvictionAges`: the slot that had been freed last when the sample was taken.

    *place* is the slot's place in the eviction order at that time. *spot* identifies the block that it held then, see
    `BlockPool.spots`. The time is kept in *since*, in seconds.
    """

    slot: int
    place: int
    spot: int
    since: float


class EvictionAges:
    """A histogram of the time from the last use of a block to its eviction, estimated from samples.

    From time to time, the most recently freed slot becomes a marker. When a marker's block is evicted, all blocks
    evicted since the previous marker count with the age of this block, because blocks are evicted in the order of their
    last use. A marker whose block is used again is dropped. Unlike a timestamp per release, this costs the pool
    nothing. Owned by the cache's thread.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._ages = Histogram(AGES_S)
        self._markers: deque[Marker] = deque()
        self._every_s = EVERY_S
        self._next_at = float("-inf")
        self._num_counted = 0  # evictions that are in the histogram

    def look(self, num_evicted: int, now: float) -> None:
        """Update the histogram of ages if it is time for the next sample. Call this often; most calls return at once.

        *num_evicted* is the number of evictions since the start, and *now* is the time in seconds.
        """
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
        if len(self._markers) > MAX_MARKERS:
            self._markers = deque(list(self._markers)[::2])
            self._every_s *= 2

    def clear(self, num_evicted: int) -> None:
        """Drop all samples, because all blocks were evicted at once. *num_evicted* includes these evictions."""
        self._markers.clear()
        self._num_counted = num_evicted

    def statistics(self) -> HistogramStatistics:
        """Return the histogram of ages in seconds."""
        return self._ages.statistics()

    def _count(self, num_evicted: int, now: float) -> None:
        evicted = []
        while self._markers:
            marker = self._markers[0]
            if self._pool.order.place(marker.slot) == marker.place:
                break
            self._markers.popleft()
            if self._spot(marker.slot) != marker.spot:  # otherwise the block was used again
                evicted.append(now - marker.since)
        for number, age_s in enumerate(evicted):
            num_blocks = (num_evicted - self._num_counted) // (len(evicted) - number)
            self._ages.add(age_s, num_blocks)
            self._num_counted += num_blocks

    def _spot(self, slot: int) -> int:
        return int(self._pool.spots(np.array([slot], np.intp))[0])


class DirtyMarks:
    """The set of dirty slots, in the order in which they became dirty.

    The slots are in a queue that consists of numbered pieces (arrays). A dirty slot is *marked* with the number of the
    piece that contains it. Removing a slot only clears its mark, without a search in the queue. Queue entries whose
    slot has another mark by now are skipped. The numbers of pieces only grow. So `clear` need not visit any slot: from
    then on, all numbers used so far are marks of clean slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._marks = np.full(num_slots, CLEAN, np.int64)
        self._clean = CLEAN  # marks up to this number are those of clean slots
        self._num_marked = 0
        self._pieces: deque[tuple[int, Ids]] = deque()
        self._num_entries = 0  # slots in all pieces, marked or not
        self._max_entries = MAX_ENTRIES * num_slots
        self._number = CLEAN  # number of the newest piece

    def __len__(self) -> int:
        return self._num_marked

    def __contains__(self, slot: int) -> bool:
        return bool(self._marks[slot] > self._clean)

    def among(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """Return for each slot whether it is dirty."""
        marked: npt.NDArray[np.bool_] = self._marks[slots] > self._clean
        return marked

    def any_among(self, slots: Ids) -> bool:
        """Return whether any of the slots is dirty (its block has yet to be copied to a lower tier)."""
        return self._num_marked > 0 and bool(self.among(slots).any())

    def add(self, slots: Ids) -> None:
        """Mark the slots that are not marked yet. The caller must not change the array *slots* afterwards."""
        is_marked = self.among(slots)
        num_before = int(np.count_nonzero(is_marked))
        self._queue(slots[~is_marked] if num_before else slots)
        self._num_marked += len(slots) - num_before
        to_look_through = 2 * len(slots)  # more than were added, so that the queue shrinks
        while self._num_entries > self._max_entries and to_look_through > 0:
            number, oldest = self._pieces.popleft()
            self._num_entries -= len(oldest)
            to_look_through -= len(oldest)
            self._queue(oldest[self._marks[oldest] == number])

    def remove(self, slots: Ids) -> None:
        """Remove these slots from the set of dirty slots. Slots that are not in it are ignored."""
        if self._num_marked:
            self._num_marked -= int(np.count_nonzero(self.among(slots)))
            self._marks[slots] = CLEAN

    def oldest(self, limit: int) -> Ids:
        """Return up to *limit* marked slots, in the order in which they were marked."""
        found: list[Ids] = []
        num_found = 0
        for number, piece in list(self._pieces) if limit > 0 else ():
            left = piece[self._marks[piece] == number]
            if not len(left) and not num_found:
                self._pieces.popleft()
                self._num_entries -= len(piece)
            found.append(left)
            num_found += len(left)
            if num_found >= limit:
                break
        return np.concatenate([NOTHING, *found])[:limit]

    def clear(self) -> deque[tuple[int, Ids]]:
        """Mark all slots as clean. Return the former queue, which the caller frees."""
        pieces, self._pieces = self._pieces, deque()
        self._clean = self._number
        self._num_marked = self._num_entries = 0
        return pieces

    def check(self) -> None:
        """Raise AssertionError if the queue of dirty slots disagrees with the mark of each slot."""
        assert self._num_marked == int(np.count_nonzero(self._marks > self._clean)), "marks were miscounted"
        assert self._num_entries == sum(len(piece) for _, piece in self._pieces), "the queue's entries were miscounted"
        assert self._num_entries <= self._max_entries + 2 * len(self._marks), "the queue has grown too long"
        queued = [slot for number, piece in self._pieces for slot in piece[self._marks[piece] == number].tolist()]
        assert len(queued) == self._num_marked, "a marked slot is queued twice, or will never be found"

    def _queue(self, slots: Ids) -> None:
        self._number += 1
        self._marks[slots] = self._number
        if len(slots):
            self._pieces.append((self._number, slots))
            self._num_entries += len(slots)


class GroupSlots:
    """A pool of slots that knows which slots are dirty, and evicts clean blocks first. Owned by the cache's thread."""

    def __init__(self, num_slots: int, is_spilled: bool, on_forgotten: OnForgotten) -> None:
        """Create blank slots.

        *is_spilled* says whether there is a tier below; without one, no slot is ever dirty. *on_forgotten* is called
        with the blocks of each eviction.
        """
        self.pool = BlockPool(num_slots)
        self.dirty = DirtyMarks(num_slots)
        self.is_spilled = is_spilled
        self.num_lost = 0  # number of calls that reported lost copies
        # [slot] spot of a block whose copy below was evicted on purpose, see `on_evicted_below`; NO_SPOT for others.
        self._pushed_out: npt.NDArray[np.int64] | None = None
        self.num_evicted = 0  # blocks evicted since the start
        self._evicted = dict.fromkeys(EvictionCause, 0)
        self.dropped_spills = 0  # dirty blocks that were evicted
        self.ages = EvictionAges(self.pool)
        self._on_forgotten = on_forgotten

    @property
    def evicted(self) -> Mapping[EvictionCause, int]:
        """Number of blocks evicted since the start, by cause, without causes that never occurred."""
        return {cause: number for cause, number in self._evicted.items() if number}

    def on_copies_lost(self, slots: Sequence[int] | Ids) -> None:
        """Mark these slots dirty, because the copies of their blocks in the lower tiers are lost."""
        if self.is_spilled and len(slots):
            self.num_lost += 1
            ids = np.array(slots, np.intp)
            self.dirty.add(ids)
            if self._pushed_out is not None:
                self._pushed_out[ids] = NO_SPOT

    def on_evicted_below(self, slots: Ids) -> None:
        """Mark these slots dirty, because the lower tiers evicted the copies of their blocks, for example for room.

        `uncopied` does not return these slots, unlike other dirty slots: new copies would only evict other blocks.
        """
        if self.is_spilled and len(slots):
            self.on_copies_lost(slots)
            if self._pushed_out is None:
                self._pushed_out = np.full(self.pool.num_slots, NO_SPOT, np.int64)
            self._pushed_out[slots] = self.pool.spots(slots)

    def uncopied(self, limit: int | None = None) -> Ids:
        """Return up to *limit* dirty slots (None: all) in the order in which they became dirty.

        Slots whose copy the lower tiers have evicted on purpose are left out, because copying their blocks again would
        only evict other blocks there.
        """
        if self._pushed_out is None:
            return self.dirty.oldest(len(self.dirty) if limit is None else limit)
        slots = self.dirty.oldest(len(self.dirty))
        uncopied: Ids = slots[self._pushed_out[slots] != self.pool.spots(slots)]
        return uncopied[:limit]

    def take(self, num_slots: int, window: int) -> "array[int] | None":
        """Lease *num_slots* slots, evicting clean blocks first; return None without any effect if too few are free.

        Looks for clean blocks among the oldest ones: as many as are needed, plus *window* more. If too few of these are
        clean, dirty blocks are evicted as well; these are lost and counted. Never waits for a copy.
        """
        pool = self.pool
        if num_slots > pool.num_blank:
            if num_slots > pool.num_free:
                return None
            victims = self._choose(num_slots - pool.num_blank, window)
            were_dirty = self._clean(victims)
            leased, names = pool.evict_and_lease(num_slots, victims)
            self._tell(victims, names, were_dirty, EvictionCause.ROOM)
            return array("i", leased.astype(np.int32).tobytes())
        slots = pool.allocate(num_slots)
        return None if slots is None else array("i", slots)

    def take_clean(self, num_slots: int, window: int) -> list[int]:
        """Lease up to *num_slots* slots without evicting any dirty block.

        Looks for clean blocks among the oldest ones: as many as are needed, plus *window* more.
        """
        missing = num_slots - self.pool.num_blank
        if missing > 0:
            self.evict(self._oldest_clean(missing + window, missing), EvictionCause.ROOM)
        return self.pool.allocate(min(num_slots, self.pool.num_blank)) or []

    def num_clean(self, window: int, besides: npt.NDArray[np.integer[Any]] = NOTHING) -> int:
        """Return the number of slots without a block, plus the clean ones among the next *window* slots to be evicted.

        If there is no lower tier, return only the number of slots without a block. The slots in *besides* are ignored,
        because they are about to be leased.
        """
        pool = self.pool
        if not self.is_spilled:
            return pool.num_blank
        oldest = pool.order.oldest(window + len(besides))
        if len(besides):
            counts = np.ones(pool.num_slots, np.bool_)
            counts[besides] = False
            oldest = oldest[counts[oldest]]
        return pool.num_blank + int(np.count_nonzero(~self.dirty.among(oldest[:window])))

    def evict(self, slots: Slots, cause: EvictionCause) -> None:
        """Evict the blocks in these slots, whether the slots are leased or not."""
        ids = np.asarray(slots, np.intp)
        were_dirty = self._clean(ids)
        self._tell(ids, self.pool.evict(ids), were_dirty, cause)

    def clear(self) -> ClearedBlocks:
        """Evict the blocks in all slots, leased or not, in one short step and without callbacks.

        Returns the data of the blocks, which the caller frees in parts.
        """
        num_named = self.pool.num_named
        cleared = self.pool.clear()
        cleared.leftovers.add(self.dirty.clear())
        self.num_evicted += num_named
        self._evicted[EvictionCause.CLEARED] += num_named
        self.ages.clear(self.num_evicted)  # `_pushed_out` stays, because no later block gets one of its spots
        return cleared

    def check(self) -> None:
        """Raise AssertionError if the pool is inconsistent or a slot without a block is dirty."""
        self.pool.check()
        self.dirty.check()
        assert self.is_spilled or not self.dirty, "dirty slots, and no tier to spill to"
        assert self.pool.are_named(self.dirty.oldest(len(self.dirty))).all(), "a slot without a block is dirty"

    def _choose(self, num_slots: int, window: int) -> Ids:
        """Return up to *num_slots* cached slots to evict, clean ones first.

        Clean slots are searched among the oldest *num_slots* + *window* slots. The oldest dirty slots make up the rest.
        """
        oldest = self.pool.order.victims(num_slots)
        if not self.dirty.any_among(oldest):
            return oldest
        clean = self._oldest_clean(num_slots + window, num_slots)
        passed_over = oldest[np.isin(oldest, clean, invert=True)]
        return np.concatenate([clean, passed_over[: num_slots - len(clean)]])

    def _oldest_clean(self, window: int, limit: int) -> Ids:
        """Return up to *limit* clean slots among the *window* oldest cached ones."""
        if not self.is_spilled:
            return NOTHING
        oldest = self.pool.order.oldest(window)
        return oldest[~self.dirty.among(oldest)][:limit]

    def _clean(self, slots: Ids) -> set[BlockName | None]:
        """Record that the slots are clean, and return the names of the blocks in those that were dirty before."""
        if not self.dirty.any_among(slots):
            return set()
        marked = slots[self.dirty.among(slots)]
        self.dirty.remove(marked)
        return set(map(self.pool.name, marked.tolist()))

    def _tell(
        self, slots: Ids, names: Sequence[BlockName], were_dirty: set[BlockName | None], cause: EvictionCause
    ) -> None:
        self.num_evicted += len(names)
        self._evicted[cause] += len(names)
        self._on_forgotten(slots, names, were_dirty, cause)
