"""Residency: which block is on the device, which is below, and what follows when one leaves."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.block_pool import ABSENT, BlockPool, Ids
from kvtier.tiers.device.ghosts import Ghosts
from kvtier.tiers.device.partial_matches import PartialMatches
from kvtier.tiers.device.slot_owners import SlotOwners
from kvtier.tiers.device.slot_tier import SlotTier
from kvtier.tiers.lower.lower_tiers import NOWHERE, ON_DISK, LowerTiers, Places
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, TokenIds
from kvtier.tiers.naming.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.tenant import tenant_of
from kvtier.tiers.naming.tier import Reason, Tier

NUM_GHOSTS = 1 << 16  # names of lost blocks that are remembered, to tell "evicted" from "never seen"
SLOTS_AT_ONCE = 256  # of the device that are looked through in one call: 0.1 ms of the owner's thread


class Located(NamedTuple):
    """Where blocks are: their slots on the device, ABSENT for those elsewhere; for these where below; and how many come
    before one that no tier has."""

    device_slots: npt.NDArray[np.int32]
    below: Places
    num_found: int


class Residency:
    """The device's index, together with what the tiers below say of theirs. Owned by the cache's thread; holds no bytes
    and starts no copy."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        lower: LowerTiers,
        groups: Sequence[AttentionGroup],
        partial_matches: PartialMatches | None,
        partial_group: int,
        events: EventLog | None,
    ) -> None:
        """*pools* of device slots, by group. *partial_matches* describes the device blocks of one group."""
        self.device = SlotTier(Tier.DEVICE, pools, all(lower.num_slots), self._left_device)
        self.lower = lower
        self.partial_matches = partial_matches
        self.is_cut_off = False  # the lane to the device hangs: what is below it cannot be had
        self._block_sizes = [group.block_size for group in groups]
        self._owners = [SlotOwners(pool.num_slots) for pool in pools]  # [group]
        self._partial_group = partial_group
        self._events = events
        self._ghosts = Ghosts(NUM_GHOSTS)
        self._tails: list[set[BlockName]] = [set() for _ in pools]  # blocks not full: they stay, and are not told of
        self._epoch = lower.epoch
        self._relying: Iterator[None] = iter(())  # device blocks whose copies below may be gone, some at each step

    @property
    def num_changes(self) -> int:
        """Grows with every change of which block is in which slot of device and host."""
        return self.device.num_changes + self.lower.num_changes

    def locate(self, group_id: int, names: Sequence[BlockName]) -> Located:
        """Where the blocks are."""
        nowhere = np.full(len(names), NOWHERE, np.int32)
        pool = self.device.pools[group_id]
        # A prompt never seen costs one question.
        if names and pool.find(names[0]) is None and not len(self._find_run(group_id, names[:1])):
            return Located(nowhere, nowhere, 0)
        slots = pool.find_all(names)
        absent = np.flatnonzero(slots == ABSENT)
        if not len(absent):
            return Located(slots, nowhere, len(names))
        found = self._find_run(group_id, _picked(names, absent))
        if len(found) == len(names):
            return Located(slots, found, len(names))
        nowhere[absent[: len(found)]] = found
        return Located(slots, nowhere, len(names) if len(found) == len(absent) else int(absent[len(found)]))

    def tier_of(self, group_id: int, name: BlockName) -> Tier | None:
        """The warmest tier that has the block."""
        if self.device.pools[group_id].find(name) is not None:
            return Tier.DEVICE
        place = self.lower.find(group_id, [name]).item()
        return None if place == NOWHERE else Tier.DISK if place == ON_DISK else Tier.HOST

    def why_missing(self, names: Iterable[BlockName]) -> Reason:
        """Why no tier has one of these blocks: the tier that dropped the last copy, as far as is remembered."""
        tiers = (self._ghosts.who_dropped(name) for name in names)
        tier = next((tier for tier in tiers if tier is not None), None)
        return Reason.NEVER_SEEN if tier is None else Reason.evicted_from(tier)

    def owners(self, group_id: int, slots: Ids) -> npt.NDArray[np.uint64]:
        """The tenants of the blocks in device slots."""
        return self._owners[group_id].of(slots)

    def committed(self, group_id: int, slots: Ids, chain: BlockChain, start: int) -> None:
        """The chain's blocks from *start* on, in this group's count, have been computed and named, in these slots."""
        self.device.mark_dirty(group_id, slots)
        self._owners[group_id].record(slots, tenant_of(chain.extra.cache_salt))
        if self.partial_matches is not None and group_id == self._partial_group:
            self.partial_matches.record(slots, chain, start)
        if self._events is not None:
            step = self._block_sizes[group_id] // chain.block_size
            names = chain.names[(start + 1) * step - 1 : (start + len(slots)) * step : step]
            self._tell_stored(group_id, names, chain, start)

    def committed_tail(self, group_id: int, slot: int, name: BlockName, key: bytes, token_ids: TokenIds) -> None:
        """The slot's block, of which only the first tokens are computed, has been named. It stays on the device."""
        assert self.partial_matches is not None, "only a partial match finds such a block"
        if group_id == self._partial_group:
            self.partial_matches.record_tail(slot, key, token_ids)
        self._tails[group_id].add(name)

    def came_up(
        self,
        group_id: int,
        slots: Sequence[int],
        names: Sequence[BlockName],
        tenants: Sequence[bytes],
        chain: BlockChain | None,
        start: int,
    ) -> list[int]:
        """Blocks have arrived in leased device slots: those of *chain* from *start* on, if a promotion still wants
        them.

        The slots to use: another one, where the block was computed there meanwhile.
        """
        pool, ids, used = self.device.pools[group_id], np.array(slots, np.intp), list(slots)
        if chain is not None and chain.block_size == self._block_sizes[group_id]:
            taken = pool.commit(slots, chain.names, start)
        else:
            taken = pool.commit(slots, names)
        for place in taken:
            holder = pool.find(names[place])
            assert holder is not None, "a name was taken by nobody"
            used[place] = holder
        places = [place for place in range(len(ids)) if place not in taken] if taken else range(len(ids))
        if not taken and tenants.count(tenants[0]) == len(tenants):
            self._is_up(group_id, ids, names, tenants[0], chain, start)
        else:
            for place in places:
                one = slice(place, place + 1)
                self._is_up(group_id, ids[one], names[one], tenants[place], chain, start + place)
        is_below = self.lower.find(group_id, names) != NOWHERE  # what has left meanwhile is the last copy
        if not is_below.all():
            self.device.lost_copies(group_id, [slots[place] for place in places if not is_below[place]])
        return used

    def take_in_lost(self) -> None:
        """Learn what has gone below: the device's copies of that are dirty again. Where everything may have gone, they
        are looked through, some at each call."""
        for group_id, names, tier in self.lower.take_lost():
            if self.device.pools[group_id].has_none(names):
                self._ghosts.remember(names, tier)
                continue
            slots = self.device.pools[group_id].find_all(names)
            is_here = slots != ABSENT
            self.device.lost_copies(group_id, slots[is_here])
            self._ghosts.remember(list(compress(names, (~is_here).tolist())), tier)
        if self._epoch != self.lower.epoch:
            self._epoch = self.lower.epoch
            self._relying = self._mark_uncopied()
        next(self._relying, None)

    def clear(self) -> None:
        """Forget every block of the device, after the tiers below have forgotten theirs; nothing may be leased."""
        self.device.clear()
        self._relying = iter(())
        for tails in self._tails:
            tails.clear()
        if self._events is not None:
            self._events.append(AllBlocksCleared())

    def check(self) -> None:
        """Raise AssertionError if the device's books disagree."""
        self.device.check()

    def check_tails_first(self) -> None:
        """Raise AssertionError if a device block would be evicted before one that continues it.

        So what is cached stays prefix-closed. Not so where a group forgets: it lets go of the beginning first.
        """
        if self.partial_matches is None:
            return
        pool = self.device.pools[self._partial_group]
        for slot, parent in self.partial_matches.parents(pool):
            place, parents_place = pool.place(slot), pool.place(parent)
            if place is not None and parents_place is not None:
                assert place < parents_place, "a parent is evicted before its child"

    def _find_run(self, group_id: int, names: Sequence[BlockName]) -> Places:
        return np.empty(0, np.int32) if self.is_cut_off else self.lower.find_run(group_id, names)

    def _is_up(
        self,
        group_id: int,
        slots: Ids,
        names: Sequence[BlockName],
        tenant: bytes,
        chain: BlockChain | None,
        start: int,
    ) -> None:
        self._owners[group_id].record(slots, tenant)
        if self.partial_matches is not None and group_id == self._partial_group:
            if chain is not None:
                self.partial_matches.record(slots, chain, start)
            else:
                self.partial_matches.forget(slots)
        self._tell_stored(group_id, names, chain, start)

    def _left_device(
        self, group_id: int, slots: Ids, names: Sequence[BlockName], were_dirty: set[BlockName | None]
    ) -> None:
        """The slots' blocks, of these names, cannot be found on the device any more: draw the consequences."""
        if not names:
            return
        if not self.device.is_spilled:
            self._ghosts.remember(names, Tier.DEVICE)
        elif were_dirty or not self.lower.is_in_order:  # else what is clean on the device is found below
            gone = list(compress(names, (self.lower.find(group_id, names) == NOWHERE).tolist()))
            self.device.dropped_spills += len(were_dirty.intersection(gone)) if were_dirty else 0
            self._ghosts.remember(gone, Tier.DEVICE)
        if self._tails[group_id] and (tails := self._tails[group_id].intersection(names)):
            self._tails[group_id] -= tails
            names = [name for name in names if name not in tails]
        if self._events is not None and names:
            self._events.append(BlockRemoved(Tier.DEVICE, group_id, names))

    def _mark_uncopied(self) -> Iterator[None]:
        """Have all device blocks that are nowhere below copied down; some slots at each step."""
        for group_id, pool in enumerate(self.device.pools):
            for first in range(0, pool.num_slots if pool.num_named else 0, SLOTS_AT_ONCE):
                slots = range(first, min(first + SLOTS_AT_ONCE, pool.num_slots))
                there = [(slot, name) for slot in slots if (name := pool.name(slot)) is not None]
                found = self.lower.find(group_id, [name for _, name in there])
                uncopied = [each for each, place in zip(there, found.tolist(), strict=True) if place == NOWHERE]
                tails = self._tails[group_id]
                self.device.lost_copies(group_id, [slot for slot, name in uncopied if name not in tails])
                yield

    def _tell_stored(self, group_id: int, names: Sequence[BlockName], chain: BlockChain | None, start: int) -> None:
        if self._events is None:
            return
        size = self._block_sizes[group_id]
        if chain is None:
            self._events.append(BlockStored(Tier.DEVICE, group_id, names, size))
            return
        first = start * size
        parent = chain.parent(first // chain.block_size) if start else None
        token_ids = chain.token_ids[first : first + len(names) * size]
        self._events.append(BlockStored(Tier.DEVICE, group_id, names, size, parent, token_ids, first, chain.extra))


def _picked(names: Sequence[BlockName], places: Ids) -> Sequence[BlockName]:
    """Those of the names; *places* are distinct."""
    return names if len(places) == len(names) else [names[i] for i in places.tolist()]
