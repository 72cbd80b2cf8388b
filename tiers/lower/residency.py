"""Residency: which block is in which tier, and how a slot is taken from the block that can best be spared."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.store.record import DIGEST_BYTES, Fault
from kvtier.tiers.device.block_pool import ABSENT, NOTHING, BlockPool, Ids, Slots
from kvtier.tiers.device.dirty_marks import DirtyMarks
from kvtier.tiers.device.partial_matches import PartialMatches
from kvtier.tiers.lower.admission import Admission
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventLog
from kvtier.tiers.lower.ghosts import Ghosts
from kvtier.tiers.lower.host_blocks import HostBlocks
from kvtier.tiers.lower.tenants import Origin, OwnerNumbers, Tenants, number_of, tenant_of, tenant_with
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, TokenIds
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.tier import Reason, Tier

QUOTA_PART = 1 << 12  # entries of the host's order looked through at once for blocks of a tenant over its quota
MOST_SHED = 128  # blocks that such a tenant loses at once
NUM_GHOSTS = 1 << 16  # names of lost blocks that are remembered, to tell "evicted" from "never seen"


@dataclass(slots=True)
class SlotTier:
    """The device's or the host's slots: a pool for each group, and which of its blocks have no copy further down."""

    tier: Tier
    pools: list[BlockPool]
    is_spilled: bool  # there is a tier further down; else nothing is ever dirty
    dirty: list[DirtyMarks] = field(init=False)  # [group]
    num_lost: int = 0  # times that a block lost its copy further down
    num_evicted: int = 0
    dropped_spills: int = 0
    corrupt: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.dirty = [DirtyMarks(pool.num_slots) for pool in self.pools]

    def mark_dirty(self, group_id: int, slots: Ids) -> None:
        """These slots' blocks have no copy further down yet."""
        if self.is_spilled:
            self.dirty[group_id].add(slots)

    def lost_copies(self, group_id: int, slots: Sequence[int]) -> None:
        """These slots' blocks have no copy further down any more."""
        if self.is_spilled and slots:
            self.num_lost += 1
            self.dirty[group_id].add(np.array(slots, np.intp))

    def choose(self, group_id: int, num_slots: int, window: int) -> Ids:
        """Up to *num_slots* cached slots to evict: clean ones among the oldest, then simply the oldest.

        A dirty one is passed over for a clean one that comes at most *window* later, as `Residency.num_clean` counts.
        """
        pool, dirty = self.pools[group_id], self.dirty[group_id]
        oldest = pool.victims(num_slots)
        if not dirty.any_among(oldest):
            return oldest
        clean = self.oldest_clean(group_id, num_slots + window, num_slots)
        passed_over = oldest[np.isin(oldest, clean, invert=True)]
        return np.concatenate([clean, passed_over[: num_slots - len(clean)]])

    def oldest_clean(self, group_id: int, window: int, most: int) -> Ids:
        """Of the *window* oldest cached slots up to *most* whose block may go: it will still be found below."""
        if not self.is_spilled:
            return NOTHING
        oldest = self.pools[group_id].oldest(window)
        return oldest[~self.dirty[group_id].among(oldest)][:most]

    def check(self) -> None:
        """Raise AssertionError if a pool's books disagree or a slot without a block is dirty."""
        for pool, dirty in zip(self.pools, self.dirty, strict=True):
            pool.check()
            dirty.check()
            assert self.is_spilled or not dirty, f"{self.tier}: dirty slots, and no tier to spill to"
            assert pool.are_named(dirty.oldest(len(dirty))).all(), f"{self.tier}: a slot without a block is dirty"


class Located(NamedTuple):
    """Where blocks are: their slots on the device, for those that are not there their slots in host memory, ABSENT for
    those elsewhere; and how many come before one that no tier has."""

    device_slots: npt.NDArray[np.int32]
    host_slots: npt.NDArray[np.int32]
    num_found: int


class Residency:
    """All tiers' indexes together. Owned by one thread; holds no bytes and starts no copy."""

    def __init__(
        self,
        device: SlotTier,
        host: SlotTier | None,
        disk: DiskTier | None,
        groups: Sequence[AttentionGroup],
        block_bytes: Sequence[int],
        tenants: Tenants,
        partial_matches: PartialMatches | None = None,
        partial_group: int = 0,
        events: EventLog | None = None,
    ) -> None:
        """*partial_matches* describes the device blocks of one group; *block_bytes* are the groups'."""
        self.device = device
        self.host = host
        self.disk = disk
        self.host_blocks = [HostBlocks(pool.num_slots) for pool in (() if host is None else host.pools)]  # [group]
        self._block_sizes = [group.block_size for group in groups]
        self._forgets = [group.forgets for group in groups]
        self._block_bytes = block_bytes
        self.tenants = tenants
        self.admission: Admission | None = None
        if disk is not None:
            num_blocks = disk.latest.capacity_bytes * len(block_bytes) // sum(block_bytes)
            self.admission = Admission(disk.budget, num_blocks, self._will_be_on_disk)
        self.partial_matches = partial_matches
        self._partial_group = partial_group
        self._events = events
        self.is_cut_off = False  # the lane to the device hangs: what is below it cannot be had
        self._ghosts = Ghosts(NUM_GHOSTS)
        # Tenants that are over their quota, by group, and up to where in the host's order they have no block.
        self._over_quota: dict[tuple[int, bytes], int] = {}
        self._tails: list[set[BlockName]] = [set() for _ in device.pools]  # blocks not full: nobody was told of them

    @property
    def num_changes(self) -> int:
        """Grows with every change of which block is in which slot of device and host."""
        pools = self.device.pools if self.host is None else self.device.pools + self.host.pools
        return sum(pool.num_changes for pool in pools)

    def tier_of(self, group_id: int, name: BlockName) -> Tier | None:
        """The warmest tier that has the block."""
        if self.device.pools[group_id].find(name) is not None:
            return Tier.DEVICE
        if self.host is not None and self.host.pools[group_id].find(name) is not None:
            return Tier.HOST
        if self.disk is not None and self.disk.holds(group_id, name):
            return Tier.DISK
        return None

    def locate(self, group_id: int, names: Sequence[BlockName]) -> Located:
        """Where the blocks are."""
        nowhere = np.full(len(names), ABSENT, np.int32)
        if names and self.tier_of(group_id, names[0]) is None:  # a prompt never seen costs one question
            return Located(nowhere, nowhere, 0)
        slots = self.device.pools[group_id].find_all(names)
        absent = np.flatnonzero(slots == ABSENT)
        if len(absent) and self.is_cut_off:
            return Located(slots, nowhere, int(absent[0]))
        host_slots = nowhere
        if len(absent) and self.host is not None:
            found = self.host.pools[group_id].find_all(_picked(names, absent))
            if len(absent) == len(names):
                host_slots = found
            else:
                host_slots[absent] = found
            absent = absent[found == ABSENT]
        if not len(absent):
            return Located(slots, host_slots, len(names))
        on_disk = 0 if self.disk is None else self.disk.num_held(group_id, _picked(names, absent))
        return Located(slots, host_slots, len(names) if on_disk == len(absent) else int(absent[on_disk]))

    def why_missing(self, names: Iterable[BlockName]) -> Reason:
        """Why no tier has one of these blocks: the tier that dropped the last copy, as far as is remembered."""
        tiers = (self._ghosts.who_dropped(name) for name in names)
        tier = next((tier for tier in tiers if tier is not None), None)
        return Reason.NEVER_SEEN if tier is None else Reason.evicted_from(tier)

    def has_copy_below_device(self, group_id: int, name: BlockName) -> bool:
        """Whether the device may forget the block and it will still be found."""
        if self.host is not None and self.host.pools[group_id].find(name) is not None:
            return True
        return self.disk is not None and self.disk.holds(group_id, name)

    def have_copies_below_device(self, group_id: int, names: Sequence[BlockName]) -> npt.NDArray[np.bool_]:
        """The same for each of some blocks."""
        have = np.zeros(len(names), np.bool_)
        if self.host is not None and not self.host.pools[group_id].has_none(names):
            have = self.host.pools[group_id].find_all(names) != ABSENT
        return have if self.disk is None else have | self.disk.are_held(group_id, names)

    def take(self, tier: SlotTier, group_id: int, num_slots: int, window: int) -> list[int] | None:
        """Lease that many slots of *tier*, evicting clean blocks first. None, and nothing changed, if too few are free.

        A dirty block that has to go is dropped and counted; nobody waits for a copy.
        """
        pool = tier.pools[group_id]
        if num_slots > pool.num_blank:
            if num_slots > pool.num_free:
                return None
            victims = tier.choose(group_id, num_slots - pool.num_blank, window)
            were_dirty = self._clean(tier, group_id, victims)
            slots, names = pool.evict_for(num_slots, victims)
            self._forgotten(tier, group_id, victims, names, were_dirty)
            return slots
        return pool.allocate(num_slots)

    def num_clean(
        self, tier: SlotTier, group_id: int, window: int, besides: npt.NDArray[np.integer[Any]] = NOTHING
    ) -> int:
        """How many slots could be taken now, blank or among the *window* oldest, without losing a last copy.

        The slots *besides* are about to be leased: neither they nor their places count.
        """
        pool, dirty = tier.pools[group_id], tier.dirty[group_id]
        if not tier.is_spilled:
            return pool.num_blank
        oldest = pool.oldest(window + len(besides))
        if len(besides):
            counts = np.ones(pool.num_slots, np.bool_)
            counts[besides] = False
            oldest = oldest[counts[oldest]]
        return pool.num_blank + int(np.count_nonzero(~dirty.among(oldest[:window])))

    def take_clean(self, tier: SlotTier, group_id: int, num_slots: int, window: int) -> list[int]:
        """Lease up to that many slots of *tier* without losing any block's last copy."""
        pool = tier.pools[group_id]
        missing = num_slots - pool.num_blank
        if missing > 0:
            self.evict(tier, group_id, tier.oldest_clean(group_id, missing + window, missing))
        return pool.allocate(min(num_slots, pool.num_blank)) or []

    def evict(self, tier: SlotTier, group_id: int, slots: Slots) -> None:
        """Forget the blocks in the slots of *tier*; their last copies are remembered as ghosts."""
        ids = np.asarray(slots, np.intp)
        were_dirty = self._clean(tier, group_id, ids)
        self._forgotten(tier, group_id, ids, tier.pools[group_id].evict(ids), were_dirty)

    def committed(self, group_id: int, slots: Ids, chain: BlockChain, start: int) -> None:
        """The chain's blocks from *start* on, in this group's count, have been computed and named, in these slots."""
        if self.device.is_spilled:
            self.device.mark_dirty(group_id, slots)
        self.tenants.computed(group_id, slots, tenant_of(chain.extra.cache_salt))
        if self.partial_matches is not None and group_id == self._partial_group:
            self.partial_matches.record(slots, chain, start)
        if self._events is not None:
            step = self._block_sizes[group_id] // chain.block_size
            names = chain.names[(start + 1) * step - 1 : (start + len(slots)) * step : step]
            self._tell_stored(Tier.DEVICE, group_id, names, chain, start)

    def committed_tail(self, group_id: int, slot: int, name: BlockName, key: bytes, token_ids: TokenIds) -> None:
        """The slot's block, of which only the first tokens are computed, has been named. It stays on the device."""
        assert self.partial_matches is not None, "only a partial match finds such a block"
        if group_id == self._partial_group:
            self.partial_matches.record_tail(slot, key, token_ids)
        if self._events is not None:
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
        """Blocks have arrived in leased device slots: those of *chain* from *start* on, if somebody still wants them.

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
        if taken:
            is_new = np.ones(len(ids), np.bool_)
            is_new[taken] = False
            for place in np.flatnonzero(is_new).tolist():
                self._is_up(
                    group_id, ids[place : place + 1], names[place : place + 1], tenants[place], chain, start + place
                )
        elif tenants.count(tenants[0]) == len(tenants):
            self._is_up(group_id, ids, names, tenants[0], chain, start)
        else:
            for place, tenant in enumerate(tenants):
                self._is_up(group_id, ids[place : place + 1], names[place : place + 1], tenant, chain, start + place)
        return used

    def _is_up(
        self,
        group_id: int,
        slots: Ids,
        names: Sequence[BlockName],
        tenant: bytes,
        chain: BlockChain | None,
        start: int,
    ) -> None:
        self.tenants.computed(group_id, slots, tenant)
        if self.partial_matches is not None and group_id == self._partial_group:
            if chain is not None:
                self.partial_matches.record(slots, chain, start)
            else:
                self.partial_matches.forget(slots)
        self._tell_stored(Tier.DEVICE, group_id, names, chain, start)

    def came_to_host(
        self, group_id: int, slots: Ids, names: Sequence[BlockName], start: int, digests: bytes, tenants: OwnerNumbers
    ) -> list[int]:
        """Blocks have arrived in leased host slots: those of *names* from *start* on, one after the other in one chain,
        and *names* begins with the first's parent, if it is known. *digests* of all in a row, *tenants* by number.

        The places of those that another slot has already.
        """
        assert self.host is not None, "a block came to a host tier that is not there"
        taken = self.host.pools[group_id].commit(slots, names, start)
        names = names[start:]
        if taken:
            is_new = np.ones(len(slots), np.bool_)
            is_new[taken] = False
            slots, names, tenants = slots[is_new], list(compress(names, is_new.tolist())), tenants[is_new]
            digests = np.frombuffer(digests, f"V{DIGEST_BYTES}")[is_new].tobytes()
        if len(slots):
            self.host_blocks[group_id].record(slots, digests, tenants)
            self._count_in_host(group_id, tenants, 1)
            self._tell_stored(Tier.HOST, group_id, names)
        return taken

    def all_came_to_host(
        self,
        group_id: int,
        slots: Sequence[int],
        names: Sequence[BlockName],
        digests: Sequence[bytes],
        origin: Sequence[Origin],
    ) -> list[int]:
        """The same for blocks of any chains; those of the slots whose block no other slot has already."""
        new: list[int] = []
        start = 0
        for end in range(1, len(slots) + 1):
            if end < len(slots) and origin[end] == Origin(names[end - 1], origin[start].tenant):
                continue
            row, parent = names[start:end], origin[start].parent
            taken = self.came_to_host(
                group_id,
                np.array(slots[start:end], np.intp),
                row if parent is None else [parent, *row],
                int(parent is not None),
                b"".join(digests[start:end]),
                np.full(end - start, number_of(origin[start].tenant), np.uint64),
            )
            new += [slot for place, slot in enumerate(slots[start:end]) if place not in taken]
            start = end
        return new

    def origin_in_host(self, group_id: int, slot: int) -> Origin:
        """What the block in the host slot is tied to. To no parent where a group forgets: it needs no more than its
        window."""
        assert self.host is not None, "a block in a host tier that is not there"
        parent = None if self._forgets[group_id] else self.host.pools[group_id].parent(slot)
        return Origin(parent, self.host_blocks[group_id].tenant(slot))

    def used_in_host(self, group_id: int, slots: Sequence[int]) -> None:
        """Host blocks have come from the device, or were used, tails first: those that may go to disk become dirty."""
        assert self.host is not None, "a block was used in a host tier that is not there"
        if self.disk is None or self.admission is None:
            return
        pool, dirty = self.host.pools[group_id], self.host.dirty[group_id]
        ids = np.array(slots, np.intp)
        ids = ids[pool.are_named(ids) & ~dirty.among(ids)]
        rows = pool.rows(ids)
        names = [name for row in rows for name in row.names]
        parents: list[BlockName | None] = [None] * len(names)
        if not self._forgets[group_id]:
            parents = [parent for row in rows for parent in (*row.names[1:], row.parent)]
        is_asking = ~self.disk.are_held(group_id, names)
        if not is_asking.all():
            ids, asking = ids[is_asking], is_asking.tolist()
            names, parents = list(compress(names, asking)), list(compress(parents, asking))
        admitted = self.admission.admit(group_id, names, parents, self._block_bytes[group_id])
        self.host.mark_dirty(group_id, ids[np.array(admitted, np.bool_)])

    def keep_quota(self, group_id: int, tenant: bytes) -> None:
        """Have a tenant that is over its quota of host memory lose its own oldest blocks there, tails first.

        A part of the host's order is looked through now, the rest by `keep_quotas`.
        """
        if self.tenants.excess(tenant):
            self._shed(group_id, tenant, self._over_quota.pop((group_id, tenant), 0))

    def keep_quotas(self) -> None:
        """Go on with a tenant that is still over its quota."""
        if self._over_quota:
            (group_id, tenant), start = next(iter(self._over_quota.items()))
            del self._over_quota[group_id, tenant]
            self._shed(group_id, tenant, start)

    def _shed(self, group_id: int, tenant: bytes, start: int) -> None:
        """Look through a part of the host's order, from its entry *start* on, for what the tenant has too much."""
        assert self.host is not None, "a quota of a host tier that is not there"
        num_blocks = -(-self.tenants.excess(tenant) // self._block_bytes[group_id])
        slots, end = self.host.pools[group_id].ordered(start, QUOTA_PART)
        own = slots[self.host_blocks[group_id].of_tenant(slots, tenant)].tolist()
        dirty = self.host.dirty[group_id]
        clean_first = sorted(own, key=lambda slot: slot in dirty)
        going = clean_first[: min(num_blocks, MOST_SHED)]
        self.evict(self.host, group_id, going)
        if len(going) < num_blocks:
            left = start if len(going) < len(own) else end
            if left is not None:
                self._over_quota[group_id, tenant] = left

    def came_to_disk(self, group_id: int, names: Sequence[BlockName], evicted: Sequence[bytes]) -> None:
        """Blocks are on disk, and the store dropped these keys for them, the oldest it had: what is still on the device
        is dirty again.

        What is still in host memory is not written a second time: a disk smaller than the host would never rest.
        """
        assert self.disk is not None, "blocks came to a disk that is not there"
        if names:
            self.disk.index.add(group_id, names)
            self._tell_stored(Tier.DISK, group_id, names)
        for key in evicted:
            block = self.disk.block_of(key)
            if block is None:
                continue
            group_id, name = block
            self.disk.index.remove(group_id, name)
            self._tell(BlockRemoved(Tier.DISK, group_id, [name]))
            tier = self.tier_of(group_id, name)
            if tier is None:
                self._ghosts.remember([name], Tier.DISK)
            elif tier is Tier.DEVICE and not self.has_copy_below_device(group_id, name):
                self.lost(group_id, name)

    def not_on_disk(self, group_id: int, name: BlockName) -> None:
        """The store had no good record of a block that it was said to have, and has none now."""
        if self.disk is not None and self.disk.index.remove(group_id, name):
            self._tell(BlockRemoved(Tier.DISK, group_id, [name]))

    def could_not_be_read(self, group_id: int, name: BlockName, fault: Fault) -> None:
        """A read of the block gave no bytes. After an error of the disk itself the record may still be good."""
        assert self.disk is not None, "a read without a disk"
        self.disk.faults[fault.value] += fault is not Fault.MISSING
        if fault is not Fault.IO_ERROR:
            self.not_on_disk(group_id, name)
        self.lost(group_id, name)

    def was_on_disk(self, keys: Sequence[bytes]) -> None:
        """A page of what was on disk before this process started has been read."""
        assert self.disk is not None, "a page of the index of no disk"
        for group_id, names in sorted(self.disk.load(keys).items()):
            if group_id < len(self._block_sizes):
                self._tell_stored(Tier.DISK, group_id, names)

    def disk_changed(self) -> None:
        """The store was opened, or is not open any more: what is on disk is to be found out again, if there is one."""
        assert self.disk is not None, "no disk that could change"
        self.disk.take_in_opening()

    def forget_disk(self) -> None:
        """Tell of some blocks that were on disk before it changed, and are not known to be there now."""
        assert self.disk is not None, "no disk that could have changed"
        group_id, names = self.disk.index.forget_some() or (0, [])
        if self._events is None or group_id >= len(self._block_sizes):
            return
        if gone := list(compress(names, ~self.disk.index.are_held(group_id, names))):
            self._tell(BlockRemoved(Tier.DISK, group_id, gone))

    def mark_uncopied(self, num_at_once: int) -> Iterator[None]:
        """Have all blocks of host and device that are in no tier below copied down; so many slots at each step."""
        if self.host is None:
            return
        for group_id, pool in enumerate(self.host.pools):
            for first in range(0, pool.num_slots if pool.num_named else 0, num_at_once):
                slots = range(first, min(first + num_at_once, pool.num_slots))
                self.used_in_host(group_id, [slot for slot in slots if pool.name(slot) is not None])
                yield
        for group_id, pool in enumerate(self.device.pools):
            for first in range(0, pool.num_slots if pool.num_named else 0, num_at_once):
                for slot in range(first, min(first + num_at_once, pool.num_slots)):
                    name = pool.name(slot)
                    if name is None or self.has_copy_below_device(group_id, name) or self._is_tail(name):
                        continue
                    self.device.lost_copies(group_id, [slot])
                yield

    def clear(self) -> None:
        """Forget every block of device and host, after the disk has; nothing may be leased."""
        for tier in (self.device, self.host):
            for group_id, pool in enumerate(tier.pools if tier is not None else ()):
                pool.evict(pool.cached_slots())
                if tier is not None:
                    tier.dirty[group_id].clear()
        for group_id, blocks in enumerate(self.host_blocks):
            self._leave_host(group_id, blocks.slots())
        for tails in self._tails:
            tails.clear()
        self._tell(AllBlocksCleared())

    def lost(self, group_id: int, name: BlockName) -> None:
        """A copy is gone: what relied on it has to be copied again."""
        for tier in (self.device, self.host):
            slot = tier.pools[group_id].find(name) if tier is not None else None
            if tier is not None and slot is not None:
                tier.lost_copies(group_id, [slot])

    def check(self) -> None:
        """Raise AssertionError if the indexes disagree."""
        self.device.check()
        if self.host is None:
            return
        self.host.check()
        host_bytes = dict.fromkeys(self.tenants.host_bytes, 0)
        for pool, blocks, num_bytes in zip(self.host.pools, self.host_blocks, self._block_bytes, strict=True):
            named = [slot for slot in range(pool.num_slots) if pool.name(slot) is not None]
            assert named == blocks.slots().tolist(), "a host block without a digest, or a digest without a block"
            for slot in named:
                if (tenant := blocks.tenant(slot)) in host_bytes:
                    host_bytes[tenant] += num_bytes
        assert self.tenants.host_bytes == host_bytes, "a tenant's bytes are miscounted"
        if self.admission is not None:
            self.admission.check()

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

    def _clean(self, tier: SlotTier, group_id: int, slots: Ids) -> set[BlockName | None]:
        """Take the slots' dirty marks away; the names of the blocks that had one."""
        dirty = tier.dirty[group_id]
        if not dirty.any_among(slots):
            return set()
        marked = slots[dirty.among(slots)]
        dirty.remove(marked)
        return set(map(tier.pools[group_id].name, marked.tolist()))

    def _forgotten(
        self,
        tier: SlotTier,
        group_id: int,
        slots: Ids,
        names: Sequence[BlockName],
        were_dirty: set[BlockName | None],
    ) -> None:
        """The slots' blocks, of these names, cannot be found in *tier* any more: draw the consequences."""
        if tier is self.host:
            self._leave_host(group_id, slots)
            if not self.device.pools[group_id].has_none(names):
                self._lost_below_device(group_id, names)
        if not names:
            return
        tier.num_evicted += len(names)
        # What is clean on the device is found below, but for blocks whose disk is out of order.
        if were_dirty or not self.device.is_spilled or tier is self.host or not self._disk_is_readable:
            gone = self._nowhere(group_id, names, besides=tier)
            tier.dropped_spills += len(were_dirty.intersection(gone)) if were_dirty else 0
            self._ghosts.remember(gone, tier.tier)
        if self._events is not None:
            if tier is self.device:
                tails = self._tails[group_id].intersection(names)
                self._tails[group_id] -= tails
                names = [name for name in names if name not in tails] if tails else names
            if names:
                self._events.append(BlockRemoved(tier.tier, group_id, names))

    @property
    def _disk_is_readable(self) -> bool:
        return self.disk is None or self.disk.is_readable

    def _is_tail(self, name: BlockName) -> bool:
        """Whether it is a device block that is not full: such blocks stay there."""
        slot = None if self.partial_matches is None else self.device.pools[self._partial_group].find(name)
        return self.partial_matches is not None and slot is not None and self.partial_matches.is_part(slot)

    def _leave_host(self, group_id: int, slots: Ids) -> None:
        blocks = self.host_blocks[group_id]
        left = blocks.forget(slots)
        self._count_in_host(group_id, blocks.tenants(left), -1)

    def _count_in_host(self, group_id: int, tenants: OwnerNumbers, sign: int) -> None:
        """The tenants have each a block more in host memory, or, if *sign* is -1, one less."""
        if self.tenants.any_quotas:
            numbers, counts = np.unique(tenants, return_counts=True)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                self.tenants.came_to_host(tenant_with(number), sign * count * self._block_bytes[group_id])

    def _will_be_on_disk(self, group_id: int, name: BlockName) -> bool:
        """Whether the disk has the block, or it has been admitted there."""
        if self.disk is not None and self.disk.index.holds(group_id, name):
            return True
        slot = None if self.host is None else self.host.pools[group_id].find(name)
        return self.host is not None and slot is not None and slot in self.host.dirty[group_id]

    def _lost_below_device(self, group_id: int, names: Sequence[BlockName]) -> None:
        """The host has dropped these: what the device still has of them, and the disk has not, is dirty again."""
        on_device = zip(self.device.pools[group_id].find_all(names).tolist(), names, strict=True)
        there = [(slot, name) for slot, name in on_device if slot != ABSENT]
        lost = [slot for slot, name in there if self.disk is None or not self.disk.holds(group_id, name)]
        self.device.lost_copies(group_id, lost)

    def _nowhere(self, group_id: int, names: Sequence[BlockName], besides: SlotTier) -> Sequence[BlockName]:
        """Those of the names that no tier has but for *besides*."""
        rest = names
        for tier in (self.device, self.host):
            if tier is not None and tier is not besides and not tier.pools[group_id].has_none(rest):
                rest = list(compress(rest, (tier.pools[group_id].find_all(rest) == ABSENT).tolist()))
        if self.disk is None or not self.disk.is_readable:
            return rest
        is_on_disk = self.disk.index.holds
        return [name for name in rest if not is_on_disk(group_id, name)]

    def _tell_stored(
        self,
        tier: Tier,
        group_id: int,
        names: Sequence[BlockName],
        chain: BlockChain | None = None,
        start: int = 0,
    ) -> None:
        if self._events is None:
            return
        size = self._block_sizes[group_id]
        if chain is None:
            self._events.append(BlockStored(tier, group_id, names, size))
            return
        first = start * size
        parent = chain.parent(first // chain.block_size) if start else None
        token_ids = chain.token_ids[first : first + len(names) * size]
        self._events.append(BlockStored(tier, group_id, names, size, parent, token_ids, first, chain.extra))

    def _tell(self, event: Event) -> None:
        if self._events is not None:
            self._events.append(event)


def _picked(names: Sequence[BlockName], places: npt.NDArray[np.int64]) -> Sequence[BlockName]:
    """Those of the names; *places* are distinct."""
    return names if len(places) == len(names) else [names[i] for i in places.tolist()]
