"""GroupSlots: one group's slots on the device or in host memory, and which of their blocks have a copy below."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.device.dirty_marks import DirtyMarks
from kvtier.tiers.device.eviction_ages import EvictionAges
from kvtier.tiers.device.slot_ids import NOTHING, Ids, Slots
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.eviction import EvictionCause

NO_SPOT = -1

OnForgotten = Callable[[Ids, Sequence[BlockName], set[BlockName | None], EvictionCause], None]
"""Called when slots have lost their blocks: with the slots, the blocks' names, the names of those that had no copy
below, and why."""


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

    def uncopied(self, most: int | None = None) -> Ids:
        """Up to *most* dirty slots, the one marked first first, whose blocks were not pushed out below before: those
        would push out others."""
        if self._pushed_out is None:
            return self.dirty.oldest(len(self.dirty) if most is None else most)
        slots = self.dirty.oldest(len(self.dirty))
        uncopied: Ids = slots[self._pushed_out[slots] != self.pool.spots(slots)]
        return uncopied[:most]

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

    def _oldest_clean(self, window: int, most: int) -> Ids:
        """Up to *most* clean slots among the *window* oldest cached ones: their blocks will still be found below."""
        if not self.is_spilled:
            return NOTHING
        oldest = self.pool.order.oldest(window)
        return oldest[~self.dirty.among(oldest)][:most]

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
