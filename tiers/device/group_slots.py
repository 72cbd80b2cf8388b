"""GroupSlots: one group's slots on the device or in host memory, and which of their blocks have a copy below."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.device.slot_ids import NOTHING, Ids, Slots
from kvtier.tiers.histogram import Histogram, HistogramStatistics
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.eviction import EvictionCause
from kvtier.tiers.naming.tenant import OwnerNumbers, number_of

# A tier should hold about ten minutes of new KV (trace study): buckets are closest around that.
AGES_S = (1, 5, 15, 30, 60, 120, 300, 450, 600, 900, 1200, 1800, 3600, 7200, 21600, 86400)
EVERY_S = 0.25
MAX_MARKERS = 4096
NO_AGES = Histogram(AGES_S).statistics()
MAX_ENTRIES = 4  # for each slot: when the queue is longer, its oldest pieces are queued anew
CLEAN = 0
NO_SPOT = -1

OnForgotten = Callable[[Ids, Sequence[BlockName], set[BlockName | None], EvictionCause], None]
"""Called when slots have lost their blocks: with the slots, the blocks' names, the names of those that had no copy
below, and why."""


class SlotOwners:
    """A tenant for each slot, at first the one without a name. Owned by the cache's thread."""

    def __init__(self, num_slots: int) -> None:
        self._numbers = np.zeros(num_slots, np.uint64)
        self._any_named = False  # whether any slot is of a tenant with a name

    def record(self, slots: Ids, tenant: bytes) -> None:
        """Note that the tenant's blocks are in these slots."""
        if not tenant and not self._any_named:
            return  # all slots are of the tenant without a name already
        self._any_named = True
        self._numbers[slots] = number_of(tenant)

    def of(self, slots: Ids) -> OwnerNumbers:
        """The tenants of the blocks in the slots."""
        return self._numbers[slots]


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
        if len(self._markers) > MAX_MARKERS:
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


class DirtyMarks:
    """A mark for each slot, and a queue of the marked slots, the one marked first first.

    A mark is the number of the piece of the queue that its slot is in, and counts only there. So taking a mark away
    costs no search; a slot that is not marked any more is left out when it comes to the queue's front.
    """

    def __init__(self, num_slots: int) -> None:
        self._marks = np.full(num_slots, CLEAN, np.int64)
        self._num_marked = 0
        self._pieces: deque[tuple[int, Ids]] = deque()
        self._num_entries = 0  # slots in all pieces, marked or not
        self._max_entries = MAX_ENTRIES * num_slots
        self._number = CLEAN  # of the newest piece

    def __len__(self) -> int:
        return self._num_marked

    def __contains__(self, slot: int) -> bool:
        return bool(self._marks[slot] != CLEAN)

    def among(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """For each of the slots whether it is marked."""
        marked: npt.NDArray[np.bool_] = self._marks[slots] != CLEAN
        return marked

    def any_among(self, slots: Ids) -> bool:
        """Whether one of the slots is marked."""
        return self._num_marked > 0 and bool(np.count_nonzero(self._marks[slots]))

    def add(self, slots: Ids) -> None:
        """Mark the slots that are not marked yet. The array is kept."""
        num_before = int(np.count_nonzero(self._marks[slots]))
        self._queue(slots[self._marks[slots] == CLEAN] if num_before else slots)
        self._num_marked += len(slots) - num_before
        to_look_through = 2 * len(slots)  # more than are added, so that the queue gets shorter
        while self._num_entries > self._max_entries and to_look_through > 0:
            number, oldest = self._pieces.popleft()
            self._num_entries -= len(oldest)
            to_look_through -= len(oldest)
            self._queue(oldest[self._marks[oldest] == number])

    def remove(self, slots: Ids) -> None:
        """Take the marks of these slots away."""
        if self._num_marked:
            self._num_marked -= int(np.count_nonzero(self._marks[slots]))
            self._marks[slots] = CLEAN

    def oldest(self, limit: int) -> Ids:
        """Up to that many marked slots, in the order in which they were marked."""
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

    def clear(self) -> None:
        """Take all marks away."""
        self._marks.fill(CLEAN)
        self._num_marked = self._num_entries = 0
        self._pieces.clear()

    def check(self) -> None:
        """Raise AssertionError if marks and queue disagree."""
        assert self._num_marked == int(np.count_nonzero(self._marks)), "marks were miscounted"
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
    """A pool of slots, and marks on the *dirty* ones: their blocks have no copy below. Owned by the cache's thread."""

    def __init__(self, num_slots: int, is_spilled: bool, on_forgotten: OnForgotten) -> None:
        """*is_spilled*: whether there is a tier below; without one no slot is ever dirty."""
        self.pool = BlockPool(num_slots)
        self.dirty = DirtyMarks(num_slots)
        self.is_spilled = is_spilled
        self.num_lost = 0  # times that blocks lost their copies below
        self._pushed_out: npt.NDArray[np.int64] | None = None  # by slot: the spot of the block that was, see there
        self._evicted = dict.fromkeys(EvictionCause, 0)
        self.dropped_spills = 0  # blocks evicted without a copy below
        self.ages = EvictionAges(self.pool)
        self._on_forgotten = on_forgotten

    @property
    def num_evicted(self) -> int:
        """Blocks evicted since the start."""
        return sum(self._evicted.values())

    @property
    def evicted(self) -> Mapping[EvictionCause, int]:
        """Blocks evicted since the start, by cause, those that there were."""
        return {cause: number for cause, number in self._evicted.items() if number}

    def mark_dirty(self, slots: Ids) -> None:
        """Mark these slots: their blocks have no copy below yet."""
        if self.is_spilled:
            self.dirty.add(slots)

    def on_copies_lost(self, slots: Sequence[int] | Ids) -> None:
        """Mark these slots: their blocks have no copy below any more."""
        if self.is_spilled and len(slots):
            self.num_lost += 1
            ids = np.array(slots, np.intp)
            self.dirty.add(ids)
            if self._pushed_out is not None:
                self._pushed_out[ids] = NO_SPOT

    def on_pushed_out(self, slots: Ids) -> None:
        """Mark these slots: the tiers below did not want to keep the copies of their blocks."""
        if self.is_spilled and len(slots):
            self.on_copies_lost(slots)
            if self._pushed_out is None:
                self._pushed_out = np.full(self.pool.num_slots, NO_SPOT, np.int64)
            self._pushed_out[slots] = self.pool.spots(slots)

    def uncopied(self, limit: int | None = None) -> Ids:
        """Up to *limit* dirty slots, the one marked first first, whose blocks were not pushed out below before: those
        would push out others."""
        if self._pushed_out is None:
            return self.dirty.oldest(len(self.dirty) if limit is None else limit)
        slots = self.dirty.oldest(len(self.dirty))
        uncopied: Ids = slots[self._pushed_out[slots] != self.pool.spots(slots)]
        return uncopied[:limit]

    def take(self, num_slots: int, window: int) -> list[int] | None:
        """Lease that many slots, evicting clean blocks first. None, and nothing changed, if too few are free.

        A dirty block that has to go is dropped and counted. Never waits for a copy.
        """
        pool = self.pool
        if num_slots > pool.num_blank:
            if num_slots > pool.num_free:
                return None
            victims = self._choose(num_slots - pool.num_blank, window)
            were_dirty = self._clean(victims)
            slots, names = pool.evict_for(num_slots, victims)
            self._tell(victims, names, were_dirty, EvictionCause.ROOM)
            return slots
        return pool.allocate(num_slots)

    def take_clean(self, num_slots: int, window: int) -> list[int]:
        """Lease up to that many slots without losing any block's last copy."""
        missing = num_slots - self.pool.num_blank
        if missing > 0:
            self.evict(self._oldest_clean(missing + window, missing), EvictionCause.ROOM)
        return self.pool.allocate(min(num_slots, self.pool.num_blank)) or []

    def num_clean(self, window: int, besides: npt.NDArray[np.integer[Any]] = NOTHING) -> int:
        """How many slots could be taken now, blank or among the *window* oldest, without losing a last copy.

        The slots *besides* are about to be leased: they and their places do not count.
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
        """Forget the blocks in the slots, leased or not."""
        ids = np.asarray(slots, np.intp)
        were_dirty = self._clean(ids)
        self._tell(ids, self.pool.evict(ids), were_dirty, cause)

    def clear(self) -> Sequence[BlockName]:
        """Forget every block without telling of it, but for the count; no slot may be leased. The blocks' names, the
        oldest first."""
        names = self.pool.evict(self.pool.cached_slots())
        self._evicted[EvictionCause.CLEARED] += len(names)
        self.dirty.clear()
        self._pushed_out = None
        return names

    def check(self) -> None:
        """Raise AssertionError if the pool's books disagree or a slot without a block is dirty."""
        self.pool.check()
        self.dirty.check()
        assert self.is_spilled or not self.dirty, "dirty slots, and no tier to spill to"
        assert self.pool.are_named(self.dirty.oldest(len(self.dirty))).all(), "a slot without a block is dirty"

    def _choose(self, num_slots: int, window: int) -> Ids:
        """Up to *num_slots* cached slots to evict: clean ones among the oldest first, then dirty ones.

        A dirty one is passed over for a clean one that comes at most *window* later, as `num_clean` counts.
        """
        oldest = self.pool.order.victims(num_slots)
        if not self.dirty.any_among(oldest):
            return oldest
        clean = self._oldest_clean(num_slots + window, num_slots)
        passed_over = oldest[np.isin(oldest, clean, invert=True)]
        return np.concatenate([clean, passed_over[: num_slots - len(clean)]])

    def _oldest_clean(self, window: int, limit: int) -> Ids:
        """Up to *limit* clean slots among the *window* oldest cached ones: their blocks will still be found below."""
        if not self.is_spilled:
            return NOTHING
        oldest = self.pool.order.oldest(window)
        return oldest[~self.dirty.among(oldest)][:limit]

    def _clean(self, slots: Ids) -> set[BlockName | None]:
        """Take the slots' dirty marks away; the names of the blocks that had one."""
        if not self.dirty.any_among(slots):
            return set()
        marked = slots[self.dirty.among(slots)]
        self.dirty.remove(marked)
        return set(map(self.pool.name, marked.tolist()))

    def _tell(
        self, slots: Ids, names: Sequence[BlockName], were_dirty: set[BlockName | None], cause: EvictionCause
    ) -> None:
        self._evicted[cause] += len(names)
        self._on_forgotten(slots, names, were_dirty, cause)
