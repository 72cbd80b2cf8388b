"""The index of the tiers below the device: which block is in host memory, and which is on disk."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress, groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from kvtier.store.record import DIGEST_BYTES, Fault
from kvtier.tiers.device.cleared_blocks import ClearedBlocks
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.device.ghosts import NUM_GHOSTS
from kvtier.tiers.device.group_slots import GroupSlots
from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.admission import Admission
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.host_quotas import HostBlocks, HostQuotas
from kvtier.tiers.lower.lower_tiers import NOWHERE, ON_DISK, ON_REMOTE, Lost, Places, names_at
from kvtier.tiers.lower.remote.remote_tier import RemoteTier
from kvtier.tiers.lower.spill_log import SpillLog
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.events import BlockRemoved, BlockStored, Event, EventLog
from kvtier.tiers.naming.groups import BlockGroup, state_groups
from kvtier.tiers.naming.named_blocks import Origin, OwnerNumbers, number_of
from kvtier.tiers.naming.tier import EvictionCause, Tier
from kvtier.transfer.transfer_engine import Route


class LowerIndex:
    """The index of the blocks in host memory and on disk. It also does the bookkeeping when blocks arrive or leave.

    The index starts no copies and holds no bytes. `pop_lost` reports the blocks that neither tier has any more, because
    the device may then hold the last copy. Owned by the tiers' thread.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        num_slots: Sequence[int],
        block_bytes: Sequence[int],
        disk: DiskTier,
        remote: RemoteTier | None,
        quotas: Mapping[bytes, int],
        events: EventLog | None,
        spills: SpillLog | None,
    ) -> None:
        """Create an empty index.

        *num_slots* (of host memory) and *block_bytes* are by attention group. *quotas* limits the bytes of host memory
        of each tenant.
        """
        self.host = [  # [group]
            GroupSlots(num, disk.is_there, partial(self._on_left_host, group_id))
            for group_id, num in enumerate(num_slots)
        ]
        self.corrupt: Counter[str] = Counter()  # blocks of host memory with wrong bytes, by cause
        self.disk = disk
        self.remote = remote
        self.host_blocks = [HostBlocks(num) for num in num_slots]  # [group]
        self.quotas = HostQuotas(quotas, self.host, self.host_blocks, block_bytes)
        num_blocks = disk.latest.capacity_bytes * len(block_bytes) // sum(block_bytes)
        self.admission = Admission(disk.budget, num_blocks, self._will_be_on_disk)
        self.epoch = 0  # see `LowerStatus.epoch`
        self._block_sizes = [group.block_size for group in groups]
        self.of_states = state_groups(groups)
        self.forgets = [group.forgets for group in groups]  # by group, whether its attention reads only recent blocks
        self._block_bytes = block_bytes
        self._events = events
        self.spills = spills
        self._lost: list[Lost] = []
        # Blocks that `clear_host` has evicted: their group, their data, and whether events report them.
        self._cleared: deque[tuple[int, ClearedBlocks, bool]] = deque()
        self._num_to_report = dict.fromkeys((Tier.HOST, Tier.DISK), 0)  # limit on losses still to be reported

    def find(self, group_id: int, names: Sequence[BlockName]) -> Places:
        """Return where the blocks are; see `LowerTiers.find`."""
        places = self.host[group_id].pool.find_all(names)
        absent = np.flatnonzero(places == ABSENT)
        if len(absent) and self.disk.is_there:
            places[absent[self.disk.are_held(group_id, names_at(names, absent))]] = ON_DISK
            absent = np.flatnonzero(places == NOWHERE)
        if len(absent) and self.remote is not None:
            places[absent[self.remote.are_held(group_id, names_at(names, absent))]] = ON_REMOTE
        return places

    def find_run(self, group_id: int, names: Sequence[BlockName]) -> Places:
        """Return the places of the first blocks, up to one that no tier has; see `LowerTiers.find_run`.

        For a few blocks of a long prompt, the place may be the disk although they are in host memory too; see
        `BlockPool.has_no_run_of`.
        """
        pool = self.host[group_id].pool
        if self.remote is None and pool.has_no_run_of(names):
            num_held = self.disk.num_held(group_id, names)
            if num_held == len(names) or pool.find(names[num_held]) is None:
                return np.full(num_held, ON_DISK, np.int32)
        places = pool.find_all(names)
        absent = np.flatnonzero(places == ABSENT)
        if not len(absent):
            return places
        if self.remote is not None:
            return _run(self.find(group_id, names))
        num_held = self.disk.num_held(group_id, names_at(names, absent))
        places[absent[:num_held]] = ON_DISK
        return places if num_held == len(absent) else places[: int(absent[num_held])]

    def are_remote(self, group_id: int, names: Sequence[BlockName]) -> npt.NDArray[np.bool_]:
        """Return for each block whether only the remote tier has it, as far as is known.

        Call this only for blocks that are not in host memory, which is not checked.
        """
        if self.remote is None:
            return np.zeros(len(names), np.bool_)
        return self.remote.are_held(group_id, names) & ~self.disk.are_held(group_id, names)

    def pop_lost(self) -> Sequence[Lost]:
        """Return the blocks that have disappeared from both host memory and disk since the last call."""
        if not self._lost:
            return ()
        lost, self._lost = self._lost, []
        return lost

    def add_chain_to_host(
        self, group_id: int, slots: Ids, names: list[BlockName], start: int, digests: bytes, tenants: OwnerNumbers
    ) -> list[int]:
        """Add blocks that were copied into leased host slots to the index, and return the indices of the duplicates.

        A duplicate is a block that another host slot already holds; it is not added. The blocks are consecutive blocks
        of one prompt, and `names[start:]` are their names. *start* is 1 if *names* begins with the name of the block
        before them, otherwise 0. The list must not change afterwards, because the pool keeps it. *digests* has the
        blocks' digests, concatenated. *tenants* has each block's tenant as a number.
        """
        taken = self.host[group_id].pool.commit_row(slots, names, start)
        names = names[start:]
        if taken:
            is_new = np.ones(len(slots), np.bool_)
            is_new[taken] = False
            slots, names, tenants = slots[is_new], list(compress(names, is_new.tolist())), tenants[is_new]
            digests = np.frombuffer(digests, f"V{DIGEST_BYTES}")[is_new].tobytes()
        if len(slots):
            self.host_blocks[group_id].record(slots, digests, tenants)
            if self.quotas.has_any:
                self.quotas.add(group_id, tenants)
            if self._events is not None:
                self._events.append(BlockStored(Tier.HOST, group_id, names, self._block_sizes[group_id]))
        return taken

    def add_to_host(
        self,
        group_id: int,
        slots: Sequence[int],
        names: Sequence[BlockName],
        digests: Sequence[bytes],
        origin: Sequence[Origin],
    ) -> list[int]:
        """Add blocks of any prompts as `add_chain_to_host` does; return the slots of those that are not duplicates."""
        new: list[int] = []
        start = 0
        for end in range(1, len(slots) + 1):
            if end < len(slots) and origin[end] == Origin(names[end - 1], origin[start].tenant):
                continue
            row, parent = list(names[start:end]), origin[start].parent
            taken = self.add_chain_to_host(
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
        """Return the tenant and the parent of the block in a host slot. The parent is the block before it.

        If the group's attention reads only recent blocks, the parent is None, because the block is usable without it.
        """
        parent = None if self.forgets[group_id] else self.host[group_id].pool.parent(slot)
        return Origin(parent, self.host_blocks[group_id].tenant(slot))

    def parents(self, group_id: int, rows: Sequence[NamedSpan]) -> list[BlockName | None]:
        """Return for each block of *rows* its parent, like `origin_in_host`."""
        if self.forgets[group_id]:
            return [None for row in rows for _ in row.names]
        return [parent for row in rows for parent in (*row.names[1:], row.parent)]

    def offer_to_disk(self, group_id: int, slots: Sequence[int]) -> None:
        """Mark blocks in these host slots as dirty (to be written to disk) if the disk lacks them and admits them.

        `Admission` decides which blocks the disk admits. Call this when blocks arrive from the device and when
        they are used, with the last block of a prefix first.
        """
        if not self.disk.is_there:
            return
        pool, dirty = self.host[group_id].pool, self.host[group_id].dirty
        ids = np.array(slots, np.intp)
        ids = ids[pool.are_named(ids) & ~dirty.among(ids)]
        rows = pool.rows(ids)
        names = [name for row in rows for name in row.names]
        parents = self.parents(group_id, rows)
        is_asking = ~self.disk.are_held(group_id, names)
        if not is_asking.all():
            ids, asking = ids[is_asking], is_asking.tolist()
            names, parents = list(compress(names, asking)), list(compress(parents, asking))
        admitted = self.admission.admit(group_id, names, parents, self._block_bytes[group_id])
        self.host[group_id].dirty.add(ids[np.array(admitted, np.bool_)])

    def on_written(
        self,
        group_id: int,
        names: Sequence[BlockName],
        evicted: Sequence[bytes],
        cause: EvictionCause = EvictionCause.ROOM,
    ) -> None:
        """Record that the blocks *names* were written to disk, and that the store evicted the keys *evicted*.

        An evicted block that is still in host memory is not written to disk again. Otherwise, a disk smaller than host
        memory would be written to forever.
        """
        if names:
            self.disk.index.add(group_id, names)
            self.disk.ages.on_written(names)
            if self._events is not None:
                self._events.append(BlockStored(Tier.DISK, group_id, names, self._block_sizes[group_id]))
        blocks = [block for key in evicted if (block := self.disk.block_of(key)) is not None]
        for group, together in groupby(blocks, key=itemgetter(0)):
            self._on_left_disk(group, [name for _, name in together], cause)

    def remove_from_disk_index(self, group_id: int, name: BlockName, cause: EvictionCause) -> None:
        """Remove a block from the disk's index, because the store has no valid record of the block.

        *cause* is the reason. If the block is in host memory, it becomes dirty, so that it is written again. Otherwise
        it is reported as lost.
        """
        if self.disk.index.remove(group_id, name):
            self._tell(BlockRemoved(Tier.DISK, group_id, [name], cause))
        self._record_lost_on_disk(group_id, name, cause)

    def on_read_failed(self, group_id: int, name: BlockName, fault: Fault) -> None:
        """Handle a read from disk that failed with *fault*.

        The block is removed from the disk's index, except after an I/O error: then its record may be intact.
        """
        self.disk.faults[fault.value] += fault is not Fault.MISSING
        if fault is Fault.IO_ERROR:
            self._record_lost_on_disk(group_id, name, _cause_of(fault))
        else:
            self.remove_from_disk_index(group_id, name, _cause_of(fault))

    def load_index_page(self, keys: Sequence[bytes]) -> None:
        """Add a page of keys to the disk's index. Their records were in the store when it was opened."""
        for group_id, names in sorted(self.disk.load(keys).items()):
            if self._events is not None and group_id < len(self._block_sizes):
                self._events.append(BlockStored(Tier.DISK, group_id, names, self._block_sizes[group_id]))

    def report_forgotten(self) -> None:
        """Discard the next part of the old index: the index that was in use until the store was reopened or emptied.

        For each block in this part that the new index does not have, a removal event is emitted, unless `clear_disk`
        was called with *is_event* False. Blocks that were evicted are also reported as lost.
        """
        forgotten = self.disk.index.pop_forgotten()
        if forgotten is None or not forgotten.names or forgotten.group_id >= len(self._block_sizes):
            return
        group_id, names = forgotten.group_id, forgotten.names
        is_event = forgotten.is_event and self._events is not None
        is_loss = forgotten.are_lost and self._num_to_report[Tier.DISK] > 0
        gone = list(compress(names, ~self.disk.index.are_held(group_id, names))) if is_event or is_loss else []
        if gone and is_event:
            self._tell(BlockRemoved(Tier.DISK, group_id, gone, EvictionCause.CLEARED))
        if gone and is_loss:
            self._report_cleared(group_id, gone, Tier.DISK)

    def offer_all_to_disk(self, num_at_once: int) -> Iterator[None]:
        """Call `offer_to_disk` for all blocks of host memory, *num_at_once* slots per step.

        Use this when the disk's index has been loaded, because the disk may have lost its copies. Increments `epoch`,
        which tells callers to look up again which of their blocks are still in host memory or on disk.
        """
        self.epoch += 1
        for group_id, pool in enumerate([host.pool for host in self.host]):
            for first in range(0, pool.num_slots if pool.num_named else 0, num_at_once):
                slots = range(first, min(first + num_at_once, pool.num_slots))
                self.offer_to_disk(group_id, [slot for slot in slots if pool.name(slot) is not None])
                yield

    def clear_host(self, *, is_event: bool) -> None:
        """Evict every block of host memory in one short step.

        The slots of leased blocks stay leased. Later calls of `report_cleared` report the blocks as lost, and log
        removal events if *is_event*.
        """
        for group_id, (host, blocks) in enumerate(zip(self.host, self.host_blocks, strict=True)):
            self._cleared.append((group_id, host.clear(), is_event))
            blocks.clear()
        self.quotas.clear()
        self._num_to_report[Tier.HOST] = NUM_GHOSTS

    def clear_disk(self, *, is_event: bool) -> None:
        """Remove every block from the disk's index in one short step, as `clear_host` does for host memory."""
        self.disk.index.empty(is_event=is_event)
        self._num_to_report[Tier.DISK] = NUM_GHOSTS

    def report_cleared(self) -> None:
        """Report some of the blocks that `clear_host` has evicted from host memory, and free what is left of them."""
        if not self._cleared:
            return
        group_id, cleared, is_event = self._cleared[0]
        names = cleared.pop()
        if names is None:
            self._cleared.popleft()
            return
        if not self.host[group_id].pool.has_none(names):  # some were computed again
            is_gone = self.host[group_id].pool.find_all(names) == ABSENT
            names = list(compress(names, is_gone.tolist()))
        if names and is_event:
            self._tell(BlockRemoved(Tier.HOST, group_id, names, EvictionCause.CLEARED))
        self._report_cleared(group_id, names, Tier.HOST)

    @property
    def is_reporting(self) -> bool:
        """True if `report_cleared` and `report_forgotten` still have something to report or to free."""
        return bool(self._cleared) or self.disk.index.is_forgetting

    @property
    def is_losing(self) -> bool:
        """True if `report_cleared` and `report_forgotten` still have evicted blocks to report as lost."""
        num_left = self._num_to_report
        return (bool(self._cleared) and num_left[Tier.HOST] > 0) or (
            self.disk.index.is_forgetting and num_left[Tier.DISK] > 0
        )

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        for host, blocks in zip(self.host, self.host_blocks, strict=True):
            host.check()
            named = [slot for slot in range(host.pool.num_slots) if host.pool.name(slot) is not None]
            assert named == blocks.slots().tolist(), "a host block without a digest, or a digest without a block"
        self.quotas.check()
        self.admission.check()

    def _on_left_host(
        self,
        group_id: int,
        slots: Ids,
        names: Sequence[BlockName],
        were_dirty: set[BlockName | None],
        cause: EvictionCause,
    ) -> None:
        """Update counts, lost blocks and events after the blocks *names* have left the host slots *slots*."""
        self._uncount(group_id, slots)
        if not names:
            return
        is_on_disk = self.disk.are_held(group_id, names)
        gone = list(compress(names, (~is_on_disk).tolist())) if is_on_disk.any() else names
        if gone and were_dirty and cause is not EvictionCause.CLEARED:
            self._on_dropped(group_id, [name for name in gone if name in were_dirty], cause)
        if gone:
            self._lost.append(Lost(group_id, gone, Tier.HOST, cause))
        if self._events is not None:
            self._events.append(BlockRemoved(Tier.HOST, group_id, names, cause))

    def _report_cleared(self, group_id: int, names: Sequence[BlockName], tier: Tier) -> None:
        """Report evicted blocks as lost, unless another tier below the device has them.

        After each clear, at most `NUM_GHOSTS` blocks of each tier are reported, because the cache does not remember
        more lost blocks than that.
        """
        if not names or not self._num_to_report[tier]:
            return
        gone = list(compress(names, (self.find(group_id, names) == NOWHERE).tolist()))[: self._num_to_report[tier]]
        self._num_to_report[tier] -= len(gone)
        if gone:
            self._lost.append(Lost(group_id, gone, tier, EvictionCause.CLEARED))

    def _on_left_disk(self, group_id: int, names: Sequence[BlockName], cause: EvictionCause) -> None:
        """Update index, ages, lost blocks and events after the store has evicted these blocks."""
        for name in names:
            self.disk.index.remove(group_id, name)
            self.disk.ages.on_dropped(name)
        self._tell(BlockRemoved(Tier.DISK, group_id, names, cause))
        is_in_host = self.host[group_id].pool.find_all(names) != ABSENT
        if gone := list(compress(names, (~is_in_host).tolist())):
            self._lost.append(Lost(group_id, gone, Tier.DISK, cause))

    def _on_dropped(self, group_id: int, names: Sequence[BlockName], cause: EvictionCause) -> None:
        """Count blocks that were evicted from host memory before they were written to disk."""
        self.host[group_id].dropped_spills += len(names)
        if self.spills is not None and names:
            self.spills.on_dropped(Route.HOST_TO_DISK, names, cause)

    def _uncount(self, group_id: int, slots: Ids) -> None:
        blocks = self.host_blocks[group_id]
        left = blocks.forget(slots)
        if self.quotas.has_any:
            self.quotas.remove(group_id, blocks.tenants(left))

    def _record_lost_on_disk(self, group_id: int, name: BlockName, cause: EvictionCause) -> None:
        slot = self.host[group_id].pool.find(name)
        if slot is not None:
            self.host[group_id].on_copies_lost([slot])
        else:
            self._lost.append(Lost(group_id, [name], Tier.DISK, cause))

    def _will_be_on_disk(self, group_id: int, name: BlockName) -> bool:
        """Return whether the block is on disk, or admitted and about to be written."""
        if self.disk.index.holds(group_id, name):
            return True
        slot = self.host[group_id].pool.find(name)
        return slot is not None and slot in self.host[group_id].dirty

    def _tell(self, event: Event) -> None:
        if self._events is not None:
            self._events.append(event)


def _cause_of(fault: Fault) -> EvictionCause:
    """Return the eviction cause to report for a block whose read from disk failed with *fault*.

    A missing record counts as evicted to make room, because the store evicted it without telling this process.
    """
    match fault:
        case Fault.MISSING:
            return EvictionCause.ROOM
        case Fault.IO_ERROR:
            return EvictionCause.UNREADABLE
        case _:
            return EvictionCause.CORRUPT


def _run(places: Places) -> Places:
    """Return *places* up to the first one that is NOWHERE."""
    is_nowhere = places == NOWHERE
    return places[: int(is_nowhere.argmax())] if is_nowhere.any() else places
