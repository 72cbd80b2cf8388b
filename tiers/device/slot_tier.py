"""SlotTier: the slots of the device or of host memory, and how one is taken from the block that can best be spared."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.block_pool import NOTHING, BlockPool, Ids, Slots
from kvtier.tiers.device.dirty_marks import DirtyMarks
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Tier

Forgotten = Callable[[int, Ids, Sequence[BlockName], set[BlockName | None]], None]
"""Told that a group's slots have lost their blocks: the slots, the blocks' names, and those of them that had no copy
further down."""


class SlotTier:
    """A pool for each group, and which of its blocks have no copy further down: they are *dirty*. Owned by the cache's
    thread."""

    def __init__(self, tier: Tier, pools: Sequence[BlockPool], is_spilled: bool, forgotten: Forgotten) -> None:
        """*is_spilled*: there is a tier further down; else nothing is ever dirty."""
        self.tier = tier
        self.pools = list(pools)
        self.is_spilled = is_spilled
        self.dirty = [DirtyMarks(pool.num_slots) for pool in pools]  # [group]
        self.num_lost = 0  # times that a block lost its copy further down
        self.num_evicted = 0
        self.dropped_spills = 0
        self.corrupt: Counter[str] = Counter()
        self._forgotten = forgotten

    @property
    def num_changes(self) -> int:
        """Grows with every change of which block is in which slot."""
        return sum(pool.num_changes for pool in self.pools)

    def mark_dirty(self, group_id: int, slots: Ids) -> None:
        """These slots' blocks have no copy further down yet."""
        if self.is_spilled:
            self.dirty[group_id].add(slots)

    def lost_copies(self, group_id: int, slots: Sequence[int] | Ids) -> None:
        """These slots' blocks have no copy further down any more."""
        if self.is_spilled and len(slots):
            self.num_lost += 1
            self.dirty[group_id].add(np.array(slots, np.intp))

    def take(self, group_id: int, num_slots: int, window: int) -> list[int] | None:
        """Lease that many slots, evicting clean blocks first. None, and nothing changed, if too few are free.

        A dirty block that has to go is dropped and counted; nobody waits for a copy.
        """
        pool = self.pools[group_id]
        if num_slots > pool.num_blank:
            if num_slots > pool.num_free:
                return None
            victims = self._choose(group_id, num_slots - pool.num_blank, window)
            were_dirty = self._clean(group_id, victims)
            slots, names = pool.evict_for(num_slots, victims)
            self._tell(group_id, victims, names, were_dirty)
            return slots
        return pool.allocate(num_slots)

    def take_clean(self, group_id: int, num_slots: int, window: int) -> list[int]:
        """Lease up to that many slots without losing any block's last copy."""
        pool = self.pools[group_id]
        missing = num_slots - pool.num_blank
        if missing > 0:
            self.evict(group_id, self._oldest_clean(group_id, missing + window, missing))
        return pool.allocate(min(num_slots, pool.num_blank)) or []

    def num_clean(self, group_id: int, window: int, besides: npt.NDArray[np.integer[Any]] = NOTHING) -> int:
        """How many slots could be taken now, blank or among the *window* oldest, without losing a last copy.

        The slots *besides* are about to be leased: neither they nor their places count.
        """
        pool, dirty = self.pools[group_id], self.dirty[group_id]
        if not self.is_spilled:
            return pool.num_blank
        oldest = pool.oldest(window + len(besides))
        if len(besides):
            counts = np.ones(pool.num_slots, np.bool_)
            counts[besides] = False
            oldest = oldest[counts[oldest]]
        return pool.num_blank + int(np.count_nonzero(~dirty.among(oldest[:window])))

    def evict(self, group_id: int, slots: Slots) -> None:
        """Forget the blocks in the slots, whoever leases them."""
        ids = np.asarray(slots, np.intp)
        were_dirty = self._clean(group_id, ids)
        self._tell(group_id, ids, self.pools[group_id].evict(ids), were_dirty)

    def clear(self) -> None:
        """Forget every block, and tell nobody; no slot may be leased."""
        for pool, dirty in zip(self.pools, self.dirty, strict=True):
            pool.evict(pool.cached_slots())
            dirty.clear()

    def check(self) -> None:
        """Raise AssertionError if a pool's books disagree or a slot without a block is dirty."""
        for pool, dirty in zip(self.pools, self.dirty, strict=True):
            pool.check()
            dirty.check()
            assert self.is_spilled or not dirty, f"{self.tier}: dirty slots, and no tier to spill to"
            assert pool.are_named(dirty.oldest(len(dirty))).all(), f"{self.tier}: a slot without a block is dirty"

    def _choose(self, group_id: int, num_slots: int, window: int) -> Ids:
        """Up to *num_slots* cached slots to evict: clean ones among the oldest, then simply the oldest.

        A dirty one is passed over for a clean one that comes at most *window* later, as `num_clean` counts.
        """
        pool, dirty = self.pools[group_id], self.dirty[group_id]
        oldest = pool.victims(num_slots)
        if not dirty.any_among(oldest):
            return oldest
        clean = self._oldest_clean(group_id, num_slots + window, num_slots)
        passed_over = oldest[np.isin(oldest, clean, invert=True)]
        return np.concatenate([clean, passed_over[: num_slots - len(clean)]])

    def _oldest_clean(self, group_id: int, window: int, most: int) -> Ids:
        """Of the *window* oldest cached slots up to *most* whose block may go: it will still be found below."""
        if not self.is_spilled:
            return NOTHING
        oldest = self.pools[group_id].oldest(window)
        return oldest[~self.dirty[group_id].among(oldest)][:most]

    def _clean(self, group_id: int, slots: Ids) -> set[BlockName | None]:
        """Take the slots' dirty marks away; the names of the blocks that had one."""
        dirty = self.dirty[group_id]
        if not dirty.any_among(slots):
            return set()
        marked = slots[dirty.among(slots)]
        dirty.remove(marked)
        return set(map(self.pools[group_id].name, marked.tolist()))

    def _tell(self, group_id: int, slots: Ids, names: Sequence[BlockName], were_dirty: set[BlockName | None]) -> None:
        self.num_evicted += len(names)
        self._forgotten(group_id, slots, names, were_dirty)
