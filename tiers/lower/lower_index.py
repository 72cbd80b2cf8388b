"""LowerIndex: which block is in host memory and which on disk."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress

import numpy as np

from kvtier.store.record import DIGEST_BYTES, Fault
from kvtier.tiers.device.group_slots import GroupSlots
from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.admission import Admission
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.host_blocks import HostBlocks
from kvtier.tiers.lower.host_quotas import HostQuotas
from kvtier.tiers.lower.lower_tiers import ON_DISK, Lost, Places
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.events import BlockRemoved, BlockStored, Event, EventLog
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.tenant import Origin, OwnerNumbers, number_of
from kvtier.tiers.naming.tier import Tier

QUOTA_PART = 1 << 12  # entries of the host's order looked through at once for blocks of a tenant over its quota
MOST_SHED = 128  # blocks that such a tenant loses at once


class LowerIndex:
    """Starts no copy and holds no bytes. Owned by the tiers' thread.

    Of what neither tier has any more it tells in `take_lost`, for who may still have a copy above.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        num_slots: Sequence[int],
        block_bytes: Sequence[int],
        disk: DiskTier,
        quotas: Mapping[bytes, int],
        events: EventLog | None,
    ) -> None:
        """*num_slots* of host memory, and *block_bytes*, by group; *quotas*: bytes of host memory by tenant."""
        self.host = [  # [group]
            GroupSlots(num, disk.is_there, partial(self._left_host, group_id)) for group_id, num in enumerate(num_slots)
        ]
        self.corrupt: Counter[str] = Counter()  # blocks in host memory
        self.disk = disk
        self.host_blocks = [HostBlocks(num) for num in num_slots]  # [group]
        self.quotas = HostQuotas(quotas)
        num_blocks = disk.latest.capacity_bytes * len(block_bytes) // sum(block_bytes)
        self.admission = Admission(disk.budget, num_blocks, self._will_be_on_disk)
        self.epoch = 0  # see `LowerTiers`
        self._block_sizes = [group.block_size for group in groups]
        self._forgets = [group.forgets for group in groups]
        self._block_bytes = block_bytes
        self._events = events
        self._lost: list[Lost] = []
        # Tenants that are over their quota, by group, and up to where in the host's order they have no block.
        self._over_quota: dict[tuple[int, bytes], int] = {}

    def find(self, group_id: int, names: Sequence[BlockName]) -> Places:
        """Where the blocks are."""
        places = self.host[group_id].pool.find_all(names)
        absent = np.flatnonzero(places == ABSENT)
        if len(absent):
            places[absent[self.disk.are_held(group_id, _picked(names, absent))]] = ON_DISK
        return places

    def find_run(self, group_id: int, names: Sequence[BlockName]) -> Places:
        """The same up to the first block that is nowhere."""
        places = self.host[group_id].pool.find_all(names)
        absent = np.flatnonzero(places == ABSENT)
        if not len(absent):
            return places
        num_held = self.disk.num_held(group_id, _picked(names, absent))
        places[absent[:num_held]] = ON_DISK
        return places if num_held == len(absent) else places[: int(absent[num_held])]

    def has(self, group_id: int, name: BlockName) -> bool:
        """Whether the block is anywhere."""
        return self.host[group_id].pool.find(name) is not None or self.disk.holds(group_id, name)

    def take_lost(self) -> Sequence[Lost]:
        """What neither tier has any more, since the last call."""
        if not self._lost:
            return ()
        lost, self._lost = self._lost, []
        return lost

    def came_to_host(
        self, group_id: int, slots: Ids, names: Sequence[BlockName], start: int, digests: bytes, tenants: OwnerNumbers
    ) -> list[int]:
        """Blocks have arrived in leased host slots: those of *names* from *start* on, one after the other in one chain,
        and *names* begins with the first's parent, if it is known. *digests* of all in a row, *tenants* by number.

        The places of those that another slot has already.
        """
        taken = self.host[group_id].pool.commit(slots, names, start)
        names = names[start:]
        if taken:
            is_new = np.ones(len(slots), np.bool_)
            is_new[taken] = False
            slots, names, tenants = slots[is_new], list(compress(names, is_new.tolist())), tenants[is_new]
            digests = np.frombuffer(digests, f"V{DIGEST_BYTES}")[is_new].tobytes()
        if len(slots):
            self.host_blocks[group_id].record(slots, digests, tenants)
            self.quotas.count(tenants, self._block_bytes[group_id])
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
        """Of the block in the host slot. It has no parent where a group forgets: it needs no more than its window."""
        parent = None if self._forgets[group_id] else self.host[group_id].pool.parent(slot)
        return Origin(parent, self.host_blocks[group_id].tenant(slot))

    def used_in_host(self, group_id: int, slots: Sequence[int]) -> None:
        """Host blocks have come from above, or were used, tails first: those that may go to disk become dirty."""
        if not self.disk.is_there:
            return
        pool, dirty = self.host[group_id].pool, self.host[group_id].dirty
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
        self.host[group_id].mark_dirty(ids[np.array(admitted, np.bool_)])

    def keep_quota(self, group_id: int, tenant: bytes) -> None:
        """Have a tenant that is over its quota of host memory lose its own oldest blocks there, tails first.

        A part of the host's order is looked through now, the rest by `keep_quotas`.
        """
        if self.quotas.excess(tenant):
            self._shed(group_id, tenant, self._over_quota.pop((group_id, tenant), 0))

    def keep_quotas(self) -> None:
        """Go on with a tenant that is still over its quota."""
        if self._over_quota:
            (group_id, tenant), start = next(iter(self._over_quota.items()))
            del self._over_quota[group_id, tenant]
            self._shed(group_id, tenant, start)

    def came_to_disk(self, group_id: int, names: Sequence[BlockName], evicted: Sequence[bytes]) -> None:
        """Blocks are on disk, and the store dropped these keys for them, the oldest it had.

        What of them is still in host memory is not written a second time: a disk smaller than the host would never
        rest.
        """
        if names:
            self.disk.index.add(group_id, names)
            self._tell_stored(Tier.DISK, group_id, names)
        for key in evicted:
            if (block := self.disk.block_of(key)) is None:
                continue
            group_id, name = block
            self.disk.index.remove(group_id, name)
            self._tell(BlockRemoved(Tier.DISK, group_id, [name]))
            if not self.has(group_id, name):
                self._lost.append(Lost(group_id, [name], Tier.DISK))

    def not_on_disk(self, group_id: int, name: BlockName) -> None:
        """The store had no good record of a block that it was said to have, and has none now: what relied on it has to
        be copied again."""
        if self.disk.index.remove(group_id, name):
            self._tell(BlockRemoved(Tier.DISK, group_id, [name]))
        self._lost_on_disk(group_id, name)

    def could_not_be_read(self, group_id: int, name: BlockName, fault: Fault) -> None:
        """A read of the block gave no bytes. After an error of the disk itself the record may still be good."""
        self.disk.faults[fault.value] += fault is not Fault.MISSING
        if fault is Fault.IO_ERROR:
            self._lost_on_disk(group_id, name)
        else:
            self.not_on_disk(group_id, name)

    def was_on_disk(self, keys: Sequence[bytes]) -> None:
        """A page of what was on disk before this process started has been read."""
        for group_id, names in sorted(self.disk.load(keys).items()):
            if group_id < len(self._block_sizes):
                self._tell_stored(Tier.DISK, group_id, names)

    def forget_disk(self) -> None:
        """Tell of some blocks that were on disk before it changed, and are not known to be there now."""
        group_id, names = self.disk.index.forget_some() or (0, [])
        if self._events is None or group_id >= len(self._block_sizes):
            return
        if gone := list(compress(names, ~self.disk.index.are_held(group_id, names))):
            self._tell(BlockRemoved(Tier.DISK, group_id, gone))

    def mark_uncopied(self, num_at_once: int) -> Iterator[None]:
        """What is on disk is known now, and may be other than it was: have all blocks of host memory that are not there
        written; so many slots at each step."""
        self.epoch += 1
        for group_id, pool in enumerate([host.pool for host in self.host]):
            for first in range(0, pool.num_slots if pool.num_named else 0, num_at_once):
                slots = range(first, min(first + num_at_once, pool.num_slots))
                self.used_in_host(group_id, [slot for slot in slots if pool.name(slot) is not None])
                yield

    def clear(self) -> None:
        """Forget every block of host memory, after the disk has; nothing may be leased."""
        for group_id, (host, blocks) in enumerate(zip(self.host, self.host_blocks, strict=True)):
            host.clear()
            self._uncount(group_id, blocks.slots())
        self._lost.clear()

    def check(self) -> None:
        """Raise AssertionError if the indexes disagree."""
        host_bytes = dict.fromkeys(self.quotas.num_bytes, 0)
        for host, blocks, num_bytes in zip(self.host, self.host_blocks, self._block_bytes, strict=True):
            host.check()
            named = [slot for slot in range(host.pool.num_slots) if host.pool.name(slot) is not None]
            assert named == blocks.slots().tolist(), "a host block without a digest, or a digest without a block"
            for slot in named:
                if (tenant := blocks.tenant(slot)) in host_bytes:
                    host_bytes[tenant] += num_bytes
        assert self.quotas.num_bytes == host_bytes, "a tenant's bytes are miscounted"
        self.admission.check()

    def _left_host(
        self, group_id: int, slots: Ids, names: Sequence[BlockName], were_dirty: set[BlockName | None]
    ) -> None:
        """The slots' blocks, of these names, cannot be found in host memory any more: draw the consequences."""
        self._uncount(group_id, slots)
        if not names:
            return
        is_on_disk = self.disk.are_held(group_id, names)
        gone = list(compress(names, (~is_on_disk).tolist())) if is_on_disk.any() else names
        if gone:
            self.host[group_id].dropped_spills += len(were_dirty.intersection(gone)) if were_dirty else 0
            self._lost.append(Lost(group_id, gone, Tier.HOST))
        if self._events is not None:
            self._events.append(BlockRemoved(Tier.HOST, group_id, names))

    def _uncount(self, group_id: int, slots: Ids) -> None:
        blocks = self.host_blocks[group_id]
        left = blocks.forget(slots)
        self.quotas.count(blocks.tenants(left), -self._block_bytes[group_id])

    def _lost_on_disk(self, group_id: int, name: BlockName) -> None:
        slot = self.host[group_id].pool.find(name)
        if slot is not None:
            self.host[group_id].on_copies_lost([slot])
        else:
            self._lost.append(Lost(group_id, [name], Tier.DISK))

    def _shed(self, group_id: int, tenant: bytes, start: int) -> None:
        """Look through a part of the host's order, from its entry *start* on, for what the tenant has too much."""
        num_blocks = -(-self.quotas.excess(tenant) // self._block_bytes[group_id])
        slots, end = self.host[group_id].pool.order.part(start, QUOTA_PART)
        own = slots[self.host_blocks[group_id].of_tenant(slots, tenant)].tolist()
        dirty = self.host[group_id].dirty
        clean_first = sorted(own, key=lambda slot: slot in dirty)
        going = clean_first[: min(num_blocks, MOST_SHED)]
        self.host[group_id].evict(going)
        if len(going) < num_blocks:
            left = start if len(going) < len(own) else end
            if left is not None:
                self._over_quota[group_id, tenant] = left

    def _will_be_on_disk(self, group_id: int, name: BlockName) -> bool:
        """Whether the disk has the block, or it has been admitted there."""
        if self.disk.index.holds(group_id, name):
            return True
        slot = self.host[group_id].pool.find(name)
        return slot is not None and slot in self.host[group_id].dirty

    def _tell_stored(self, tier: Tier, group_id: int, names: Sequence[BlockName]) -> None:
        if self._events is not None:
            self._events.append(BlockStored(tier, group_id, names, self._block_sizes[group_id]))

    def _tell(self, event: Event) -> None:
        if self._events is not None:
            self._events.append(event)


def _picked(names: Sequence[BlockName], places: Ids) -> Sequence[BlockName]:
    """Those of the names; *places* are distinct."""
    return names if len(places) == len(names) else [names[i] for i in places.tolist()]
