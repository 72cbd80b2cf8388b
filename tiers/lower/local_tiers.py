"""LocalTiers: the main implementation of `LowerTiers`, with host memory and optionally a disk and a remote tier."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, compress
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvtier.store.record import Fault
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.device.slot_ids import ABSENT, NOTHING, Ids
from kvtier.tiers.device.slot_purge import SlotPurge
from kvtier.tiers.lower.clearing import RecordDeletion
from kvtier.tiers.lower.copies import CleanAhead
from kvtier.tiers.lower.disk_purge import DiskPurge
from kvtier.tiers.lower.disk_spill import DiskSpill
from kvtier.tiers.lower.disk_tier import DiskTier, NoDisk
from kvtier.tiers.lower.index_load import IndexLoad
from kvtier.tiers.lower.local_purge import LocalPurge, limit_per_group
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.lower.lower_tiers import (
    NOTHING_TO_ASK,
    Clearing,
    Deletion,
    Inquiry,
    LowerHints,
    LowerStatistics,
    LowerTiers,
    OnFetched,
    Places,
    ReadPriority,
    SpillProgress,
)
from kvtier.tiers.lower.no_tiers import NoTiers
from kvtier.tiers.lower.other_records import OtherRecords
from kvtier.tiers.lower.purge import PurgeOrder
from kvtier.tiers.lower.reads import BlockRead, ColdReads, DiskSource, ReadProbe, Reads
from kvtier.tiers.lower.remote.remote_link import RemoteLink
from kvtier.tiers.lower.remote.remote_tier import RemoteTier
from kvtier.tiers.lower.spill_log import SpillLog
from kvtier.tiers.lower.statistics import TierStatistics, slot_statistics
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.events import EventLog
from kvtier.tiers.naming.groups import BlockGroup
from kvtier.tiers.naming.named_blocks import NamedBlocks, OwnerNumbers, number_of, tenant_with
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.transfer.block_memory import HostMemory
from kvtier.transfer.lane import LaneSpeed
from kvtier.transfer.transfer_engine import Route, TransferEngine

READS = {Tier.DISK: Route.DISK_TO_HOST, Tier.REMOTE: Route.REMOTE_TO_HOST}
RELEASED_AT_ONCE = 256  # blocks of ended fetches released per call: 0.1 ms of the tiers' thread
MIN_CLEAN_AHEAD = 32  # minimum of the host blocks kept clean (on disk), counted from the next to be evicted


class LocalFetch:
    """A request for blocks of one attention group, with leases on them in host memory; implements `Fetch`.

    `read` starts to read the blocks that are not in host memory. Each of them is leased when it has been read. Owned by
    the tiers' thread.
    """

    def __init__(
        self,
        group_id: int,
        blocks: NamedBlocks,
        slots: Places,
        index: LowerIndex,
        cold_reads: ColdReads,
        on_fetched: OnFetched,
        on_come: Callable[["LocalFetch", int, Reason | None], None],
        on_ended: Callable[["LocalFetch"], None],
    ) -> None:
        """Lease the blocks that are in host memory: block i is in slot `slots[i]`, unless that is ABSENT.

        *on_fetched* is the callback of `LowerTiers.fetch`. *on_come* is called for each block whose read has succeeded
        or failed. *on_ended* is called when the fetch holds no leases and waits for no reads.
        """
        self.group_id = group_id
        self.slots: Places = np.array(slots, np.int32)
        self.failures: dict[int, Reason] = {}
        self.on_fetched = on_fetched
        self._blocks = blocks
        self._index = index
        self._pool = index.host[group_id].pool
        self._cold_reads = cold_reads
        self._on_come = on_come
        self._on_ended = on_ended
        self._reads: dict[int, BlockRead] = {}  # queued reads and reads in flight, by the block's index in the fetch
        self._were_read: dict[int, BlockRead] = {}  # blocks that were read and leased, by index
        there = slots[slots != ABSENT]
        self.num_leased = len(there)
        self._pool.lease(there)

    @property
    def is_reading(self) -> bool:
        """True if any block of this fetch is still being read."""
        return bool(self._reads)

    def read(self, now: bool) -> None:
        """Start to read the blocks that were not in host memory, and if *now*, do so ahead of all prefetches."""
        places = np.flatnonzero(self.slots == ABSENT)
        self._reads = self._cold_reads.join(self.group_id, self._blocks, places, self, now)
        if len(self._reads) < len(places):
            for place in places.tolist():
                if place not in self._reads:
                    self.fail(place, Reason.EVICTED_FROM_HOST)

    def on_read(self, place: int, block_read: BlockRead, failure: Reason | None) -> None:
        """Lease a block that has been read, or record why its read failed."""
        del self._reads[place]
        if failure is None and block_read.host_slot is not None:
            self._pool.lease([block_read.host_slot])
            self.slots[place] = block_read.host_slot
            self._were_read[place] = block_read
            self.num_leased += 1
            self._on_come(self, place, None)
        else:
            self.fail(place, failure or Reason.FAILED)

    def fail(self, place: int, reason: Reason) -> None:
        """Record why the block with index *place* will not be leased."""
        self.failures[place] = reason
        self._on_come(self, place, reason)

    def digest(self, place: int) -> bytes:
        was_read = self._were_read.get(place)
        if was_read is not None:
            return was_read.digest
        return self._index.host_blocks[self.group_id].digest(self.slots.item(place))

    def tenant(self, place: int) -> bytes:
        was_read = self._were_read.get(place)
        if was_read is not None:
            return was_read.origin.tenant
        return self._index.host_blocks[self.group_id].tenant(self.slots.item(place))

    def tier(self, place: int) -> Tier:
        """Return the tier from which the leased block with index *place* came."""
        was_read = self._were_read.get(place)
        return Tier.HOST if was_read is None else was_read.tier

    def digests(self, places: Ids) -> bytes:
        """Return the concatenated digests of the leased blocks with the indices *places*."""
        if self._were_read:
            return b"".join(map(self.digest, places.tolist()))
        return self._index.host_blocks[self.group_id].digests(self.slots[places].astype(np.intp))

    def owners(self, places: Ids) -> OwnerNumbers:
        """Return the tenants, as numbers, of the leased blocks with the indices *places*."""
        owners = self._index.host_blocks[self.group_id].tenants(self.slots[places].astype(np.intp))
        if self._were_read:
            for number, place in enumerate(places.tolist()):
                if (was_read := self._were_read.get(place)) is not None:
                    owners[number] = number_of(was_read.origin.tenant)
        return owners

    def release(self, places: Sequence[int] | npt.NDArray[np.int64]) -> None:
        ids = np.asarray(places, np.int64)
        slots = self.slots[ids]
        there = slots[slots != ABSENT]
        tenants: list[bytes] = []
        if self._index.quotas.has_any:
            tenants = [tenant_with(number) for number in np.unique(self.owners(ids[slots != ABSENT])).tolist()]
        if len(there) < len(slots) and self._reads:
            for place in ids[slots == ABSENT].tolist():
                if (block_read := self._reads.pop(place, None)) is not None:
                    self._cold_reads.leave(block_read, self)
        self.slots[ids] = ABSENT
        self._pool.release(there)
        self.num_leased -= len(there)
        for tenant in tenants:  # while these blocks were leased, the quota could not evict them
            self._index.quotas.enforce(self.group_id, tenant)
        if not self.num_leased and not self._reads:
            self._on_ended(self)

    def time_out(self) -> None:
        for tier in {block_read.tier for block_read in self._reads.values()}:
            self._cold_reads.time_out(tier)


class Fetches:
    """The fetches of `LocalTiers` that hold a lease or wait for a read. Owned by the tiers' thread."""

    def __init__(self, index: LowerIndex, cold_reads: ColdReads) -> None:
        self._index = index
        self._cold_reads = cold_reads
        self._fetches: set[LocalFetch] = set()
        self._ending: list[set[LocalFetch]] = []  # fetches that have ended but still have leases
        self.reading: set[LocalFetch] = set()  # fetches that wait for reads with priority NOW
        # Blocks that were read or failed, to be reported by `deliver`: the fetch, the block's index in it, the failure.
        self._news: list[tuple[LocalFetch, int, Reason | None]] = []

    def __iter__(self) -> Iterator[LocalFetch]:
        return iter(list(self._fetches))

    def begin(
        self,
        group_id: int,
        blocks: NamedBlocks,
        on_fetched: OnFetched,
        found: Places | None = None,
        priority: ReadPriority = ReadPriority.NOW,
    ) -> LocalFetch:
        """Lease the blocks that are in host memory and queue reads of the rest; see `LowerTiers.fetch`."""
        slots = self._index.host[group_id].pool.find_all(blocks.names) if found is None else found
        fetch = LocalFetch(
            group_id, blocks, slots, self._index, self._cold_reads, on_fetched, self._on_come, self._on_ended
        )
        if fetch.num_leased < len(fetch.slots):
            now = priority is ReadPriority.NOW
            if now:
                self.reading.add(fetch)
            fetch.read(now)
            self._cold_reads.pump()
        if fetch.num_leased or fetch.is_reading:
            self._fetches.add(fetch)
        return fetch

    def deliver(self) -> None:
        """Call `on_fetched` for each block that was read, or whose read failed, since the last call."""
        news, self._news = self._news, []
        for fetch, place, failure in news:
            if failure is not None or fetch.slots[place] != ABSENT:  # otherwise its caller has already released it
                fetch.on_fetched(fetch, place, failure)

    def end_all(self) -> None:
        """End all fetches at once. Later calls of `end_some` release their blocks in parts."""
        self._ending.append(self._fetches)
        self._fetches, self.reading = set(), set()

    def end_some(self) -> None:
        """Release the blocks of some fetches that `end_all` has ended."""
        num_released = 0
        while self._ending and num_released < RELEASED_AT_ONCE:
            if not self._ending[-1]:
                self._ending.pop()
                continue
            fetch = self._ending[-1].pop()
            fetch.release(range(len(fetch.slots)))
            num_released += max(len(fetch.slots), RELEASED_AT_ONCE // 32)

    def num_leased(self, group_id: int) -> int:
        """Return how many host slots of the group are leased by fetches."""
        fetches = chain(self._fetches, *self._ending)
        return sum(fetch.num_leased for fetch in fetches if fetch.group_id == group_id)

    def check(self) -> None:
        """Raise AssertionError if a fetch is still in the set after its last lease and its last read have ended."""
        assert all(fetch.num_leased or fetch.is_reading for fetch in self._fetches), "a fetch that is over is kept"
        assert self.reading <= self._fetches, "a fetch that is over waits for something"

    def _on_come(self, fetch: LocalFetch, place: int, failure: Reason | None) -> None:
        self._news.append((fetch, place, failure))
        if not fetch.is_reading:
            self.reading.discard(fetch)
            if not fetch.num_leased:
                self._on_ended(fetch)

    def _on_ended(self, fetch: LocalFetch) -> None:
        self._fetches.discard(fetch)
        self.reading.discard(fetch)


class LocalStatus:
    """The state of `LocalTiers`; implements `LowerStatus`."""

    def __init__(
        self,
        index: LowerIndex,
        num_slots: Sequence[int],
        block_bytes: Sequence[int],
        transfers: TransferEngine,
        disk_spill: DiskSpill,
        remote: RemoteLink | None,
        cold_reads: ColdReads,
        fetches: Fetches,
        deletion: RecordDeletion,
        reserved: Sequence[int],
    ) -> None:
        """Create the status of these parts of `LocalTiers`.

        *reserved* is the current number of reserved slots, by attention group. `LocalTiers` keeps it up to date.
        """
        self.num_slots = num_slots
        self._index = index
        self._block_bytes = block_bytes
        self._transfers = transfers
        self._disk_spill = disk_spill
        self._remote = remote
        self._cold_reads = cold_reads
        self._fetches = fetches
        self._deletion = deletion
        self._reserved = reserved

    @property
    def host_bytes(self) -> int:
        return sum(num * each for num, each in zip(self.num_slots, self._block_bytes, strict=True))

    @property
    def num_changes(self) -> int:
        return sum(host.pool.num_changes for host in self._index.host)

    @property
    def epoch(self) -> int:
        return self._index.epoch

    @property
    def is_indexed(self) -> bool:
        return self._index.disk.index.is_loaded

    @property
    def is_readable(self) -> bool:
        return self._index.disk.reading.is_closed

    @property
    def is_making_room(self) -> bool:
        return self._disk_spill.is_making_progress

    @property
    def clearing(self) -> Clearing:
        records = self._deletion
        deletion = Deletion.FAILING if records.is_failing else Deletion.IN_PROGRESS
        return Clearing(
            Deletion.DONE if records.is_done else deletion, records.num_in_flight, is_losing=self._index.is_losing
        )

    def read_speed(self, tier: Tier) -> LaneSpeed:
        return self._transfers.speed(READS[tier])

    def queued_read_bytes(self, tier: Tier) -> int:
        return self._cold_reads.queued_bytes(tier) + self._transfers.pending_bytes(READS[tier])

    def spill_progress(self) -> SpillProgress:
        spill = self._disk_spill
        return SpillProgress(
            has_target=self._index.disk.is_there,
            is_possible=not self._index.disk.is_failing,
            num_left=spill.num_dirty,
            num_done=spill.num_stored,
            is_busy=bool(spill.copies.batches),
            ended_at=spill.copies.ended_at,
        )

    def statistics(self) -> LowerStatistics:
        index = self._index
        tiers = {Tier.HOST: slot_statistics(index.host, self._block_bytes, index.of_states, index.corrupt)}
        disk, admission = None, None
        if index.disk.is_there:
            num_states = sum(map(index.disk.index.num_blocks_of, index.of_states))
            tiers[Tier.DISK] = replace(index.disk.statistics(), num_states=num_states)
            disk, admission = index.disk.details(), index.admission.statistics()
        remote = None if self._remote is None else self._remote.statistics()
        if remote is not None:
            tiers[Tier.REMOTE] = TierStatistics(remote.known_blocks, corrupt=remote.faults)
        return LowerStatistics(tiers, disk, remote, admission, index.quotas.num_bytes)

    def check(self) -> None:
        self._index.check()
        self._cold_reads.check()
        self._fetches.check()
        for group_id, host in enumerate(self._index.host):
            fetched = self._fetches.num_leased(group_id)
            written = self._disk_spill.copies.num_leases(host.pool)
            if self._remote is not None:
                written += self._remote.num_leases(host.pool)
            read = self._cold_reads.num_leases(group_id)
            expected = fetched + written + read + self._reserved[group_id]
            assert host.pool.num_leases == expected, (
                f"host slots of group {group_id}: {host.pool.num_leases} leases, {expected} accounted for"
            )


class LocalHints(LowerHints):
    """Optional requests to `LocalTiers`, for example to copy blocks to disk. `LocalTiers` follows all of them."""

    def __init__(
        self,
        index: LowerIndex,
        disk_spill: DiskSpill,
        remote: RemoteLink | None,
        fetches: Fetches,
        windows: Sequence[CleanAhead],
        unmet: list[int],
    ) -> None:
        """Create hints that act on these parts of `LocalTiers`.

        *windows* has for each attention group the number of host blocks that should be clean (on disk), counted from
        the next one to be evicted. *unmet* counts for each group the slots that `LocalTiers.reserve` could not provide
        since the last spill.
        """
        self._index = index
        self._disk_spill = disk_spill
        self._remote = remote
        self._fetches = fetches
        self._windows = windows
        self._unmet = unmet

    @property
    def can_ask(self) -> bool:
        return self._remote is not None

    def inquire(self, group_id: int, names: Sequence[BlockName]) -> Inquiry:
        return NOTHING_TO_ASK if self._remote is None else self._remote.inquire(group_id, names)

    def evict_last(self, group_id: int, places: Places) -> None:
        self._index.host[group_id].pool.refresh(places[places >= 0][::-1])

    def spill(self) -> None:
        if self._fetches.reading:
            self.make_room()
        else:
            self._disk_spill.spill()
            if self._remote is not None:
                self._remote.spill()
            self._unmet[:] = [0 for _ in self._unmet]

    def make_room(self) -> None:
        if not self._is_roomy():
            self._disk_spill.spill()
        self._unmet[:] = [0 for _ in self._unmet]

    def _is_roomy(self) -> bool:
        """Return whether each group has enough clean host slots, which can be taken without a copy to disk first."""
        return all(
            host.num_clean(window.num_blocks + unmet) >= window.num_blocks + unmet
            for host, window, unmet in zip(self._index.host, self._windows, self._unmet, strict=True)
        )


def lower_tiers(
    groups: Sequence[BlockGroup],
    memories: Sequence[HostMemory],
    transfers: TransferEngine,
    disk: DiskTier | None = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    remote: RemoteTier | None = None,
    quotas: Mapping[bytes, int] = MappingProxyType({}),
    events: EventLog | None = None,
    spills: SpillLog | None = None,
) -> LowerTiers:
    """Create the tiers below the device: `LocalTiers` if there is host memory, otherwise `NoTiers`.

    Raises:
        ValueError: If there is a disk or remote tier but no host memory to read its blocks into.
    """
    if all(memory.num_host_slots for memory in memories):
        return LocalTiers(
            groups, memories, transfers, disk, clock, remote=remote, quotas=quotas, events=events, spills=spills
        )
    for tier in [Tier.DISK] * (disk is not None) + [Tier.REMOTE] * (remote is not None):
        raise ValueError(f"{tier} tier: needs a host tier to read into; set a host capacity or remove the {tier} tier")
    return NoTiers(len(groups))


class LocalTiers:
    """The tiers below the device in this process; implements `LowerTiers`.

    Copies between host memory and the colder tiers run in *transfers*. `poll` does not poll *transfers*, so the owner
    of the tiers' thread must do that.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        memories: Sequence[HostMemory],
        transfers: TransferEngine,
        disk: DiskTier | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        remote: RemoteTier | None = None,
        quotas: Mapping[bytes, int] = MappingProxyType({}),
        events: EventLog | None = None,
        spills: SpillLog | None = None,
    ) -> None:
        """Create tiers with empty host memory.

        *memories* holds the host slots of each attention group. *quotas* limits the bytes of host memory of each
        tenant. *events* logs the blocks that are stored in or removed from host memory and disk. *spills* logs each
        batch of blocks that was to be written to disk.
        """
        self.num_slots = [memory.num_host_slots for memory in memories]
        self._block_bytes = [memory.block_bytes for memory in memories]
        self._transfers = transfers
        self.index = LowerIndex(
            groups, self.num_slots, self._block_bytes, disk or NoDisk(clock), remote, quotas, events, spills
        )
        self._clock = clock
        # A window is the part of a pool's eviction order, from its front, in which evictions skip dirty blocks. Beyond
        # the window, they follow the order strictly. So a window is at most a quarter of the pool.
        self._windows = [CleanAhead(MIN_CLEAN_AHEAD, max(1, num_slots // 4), clock) for num_slots in self.num_slots]
        self._disk_spill = DiskSpill(self.index, memories, transfers, self._windows, clock)
        source, windows = DiskSource(self.index), self._windows
        reads: dict[Tier, Reads] = {}
        if disk is not None:
            reads[Tier.DISK] = Reads(
                self.index, source, memories, transfers, windows, lambda: self._disk_spill.is_making_progress, clock
            )
        self._remote: RemoteLink | None = None
        if remote is not None:
            self._remote = RemoteLink(
                remote, self.index, memories, transfers, windows, lambda: self._disk_spill.is_making_progress, clock
            )
            reads[Tier.REMOTE] = self._remote.reads
        self._cold_reads = ColdReads(self.index, reads)
        self._disk_probe = ReadProbe(source, self._block_bytes.__getitem__, transfers, clock)
        self._index_load = IndexLoad(self.index, transfers, clock)
        self._clearing = RecordDeletion(self.index.disk, transfers, clock)
        self.other_records = OtherRecords(self.index.disk, transfers, self.on_gone_from_disk)
        self._fetches = Fetches(self.index, self._cold_reads)
        # These methods of `LowerTiers` are methods of the index and of the fetches.
        self.find, self.find_run, self.pop_lost = self.index.find, self.index.find_run, self.index.pop_lost
        self.fetch = self._fetches.begin
        self._reserved = [0 for _ in memories]  # number of slots leased by `reserve` and `withdraw`, by group
        self._unmet = [0 for _ in memories]  # slots that `reserve` could not provide since the last `spill`
        self.hints = LocalHints(self.index, self._disk_spill, self._remote, self._fetches, windows, self._unmet)
        self.status = LocalStatus(
            self.index,
            self.num_slots,
            self._block_bytes,
            transfers,
            self._disk_spill,
            self._remote,
            self._cold_reads,
            self._fetches,
            self._clearing,
            self._reserved,
        )
        self._index_load.go_on()

    @property
    def is_forgetting(self) -> bool:
        """True if later polls still have to report blocks that were removed by `forget_all` or from the disk."""
        return self.index.is_reporting

    def reserve(self, group_id: int, num_slots: int) -> list[int]:
        host, window = self.index.host[group_id], self._windows[group_id]
        if not self.index.disk.is_failing:
            slots = host.take_clean(num_slots, window.num_blocks)
        else:
            slots = list(host.take(min(num_slots, host.pool.num_free), window.num_blocks) or ())
        window.on_allocated(len(slots))
        self._unmet[group_id] += num_slots - len(slots)
        self._reserved[group_id] += len(slots)
        return slots

    def withdraw(self, group_id: int, slots: Ids) -> bool:
        """Evict the blocks in exactly these host slots, and lease the slots to the caller as `reserve` does.

        Returns:
            Whether the slots are leased now; if not, nothing has changed. This fails if any of the slots is leased
            already. It also fails if any of the blocks must still be copied to disk, unless the disk is failing.
        """
        host = self.index.host[group_id]
        is_needed = bool(host.pool.num_leased(slots)) or (
            host.dirty.any_among(slots) and not self.index.disk.is_failing
        )
        if is_needed:
            return False
        host.evict(slots, EvictionCause.LAYOUT)
        host.pool.lease_blank(slots)
        self._reserved[group_id] += len(slots)
        return True

    def withdraw_idle(self, group_id: int, slots: Ids) -> Ids:
        """Withdraw those of the slots for which `withdraw` would succeed. Return these slots."""
        host = self.index.host[group_id]
        is_idle = ~host.pool.are_leased(slots)
        if not self.index.disk.is_failing:
            is_idle &= ~host.dirty.among(slots)
        idle = slots[is_idle]
        if len(idle):
            self.withdraw(group_id, idle)
        return idle

    def publish(
        self, group_id: int, slots: Ids, rows: Sequence[NamedSpan], digests: Sequence[bytes], owners: OwnerNumbers
    ) -> None:
        come = [self._publish_row(group_id, slots, row, digests, owners) for row in rows]
        if self.index.disk.is_there:
            self.index.offer_to_disk(group_id, np.concatenate([NOTHING, *come]).tolist())
        self.abandon(group_id, slots)
        if self._remote is not None:
            for row in rows:
                self._remote.on_come(group_id, row.names)
        if self.index.quotas.has_any:
            for number in np.unique(owners).tolist():
                self.index.quotas.enforce(group_id, tenant_with(number))

    def abandon(self, group_id: int, slots: Ids) -> None:
        self._reserved[group_id] -= len(slots)
        self.index.host[group_id].pool.release(slots)

    def refresh(self, group_id: int, names: Sequence[BlockName], were_read: Sequence[bool]) -> None:
        pool = self.index.host[group_id].pool
        slots = pool.find_all(names)
        in_host = slots[slots != ABSENT]
        pool.refresh(in_host)
        self.index.offer_to_disk(group_id, in_host.tolist())
        if self._remote is not None:
            self._remote.want(group_id, names[::-1])
        disk = self.index.disk
        assert len(were_read) in (0, len(names)), f"{len(names)} blocks were used, {len(were_read)} have an origin"
        keys = [disk.key(group_id, name) for name in compress(names, were_read)]
        if keys:  # if the lane to the disk is full, the disk does not learn of this use
            self._transfers.submit(Route.HOST_TO_DISK, lambda: disk.touch(keys), 0, lambda transfer: None)

    def forget(self, group_id: int, names: Sequence[BlockName]) -> None:
        host = self.index.host[group_id]
        self.index.corrupt[Fault.CORRUPT.value] += len(names)
        slots = host.pool.find_all(names)
        host.evict(slots[slots != ABSENT], EvictionCause.CORRUPT)

    def clear(self) -> bool:
        num_read = sum(self._cold_reads.num_leases(group_id) for group_id in range(len(self.num_slots)))
        if num_read or any(self._reserved) or self._disk_spill.copies.batches:
            return False
        if self._remote is not None and self._remote.is_writing:
            return False
        if self.index.disk.is_there and self.index.disk.is_failing:
            return False
        self._fetches.end_all()
        self._cold_reads.clear()
        self._clear(is_event=False)
        return True

    def forget_all(self) -> None:
        """Evict every block, including leased ones and those being written to disk.

        Later polls delete the records on disk, and report the removed blocks (see `is_forgetting`). Unlike `clear`,
        this method does not end fetches. So blocks that are being read still arrive in host memory.
        """
        self._clear(is_event=True)
        for batch in self._disk_spill.copies.batches:
            batch.pushed_out.update(batch.names)

    def purge(self, order: PurgeOrder) -> LocalPurge:
        disk, host = None, []
        if Tier.DISK in order.tiers and self.index.disk.is_there:
            on_gone = partial(self.on_gone_from_disk, cause=EvictionCause.CLEARED)
            disk = DiskPurge(self.index.disk, self._transfers, on_gone, order)
        if Tier.HOST in order.tiers:
            limit = limit_per_group(order.max_bytes, order.max_blocks, self._block_bytes)
            host = [
                SlotPurge(
                    slots, limit, None if order.tenant is None else partial(blocks.of_tenant, tenant=order.tenant)
                )
                for slots, blocks in zip(self.index.host, self.index.host_blocks, strict=True)
            ]
        return LocalPurge(host, self._block_bytes, disk)

    def on_gone_from_disk(self, keys: Sequence[bytes], cause: EvictionCause) -> None:
        """Record that the store has deleted the records of *keys*, for example at an operator's request.

        *cause* is the reason. If a write of blocks by these tiers evicts records, the outcome of the write lists them,
        so do not report them here.
        """
        self._disk_spill.on_gone(keys)
        if cause is EvictionCause.CLEARED:
            self.index.disk.num_cleared += sum(self.index.disk.block_of(key) is not None for key in keys)
        self.index.on_written(0, (), keys, cause)

    def poll(self) -> None:
        if self.index.disk.is_there:
            if self._clearing.is_done:
                self._index_load.go_on()
            else:
                self._clearing.go_on()
                self.index.report_forgotten()
            self._disk_probe.go_on()
        if self._remote is not None:
            self._remote.go_on()
        self._cold_reads.pump()
        if self.index.quotas.has_any:
            self.index.quotas.go_on()
        self._fetches.deliver()
        self._fetches.end_some()
        self.index.report_cleared()
        now = self._clock()
        for host in self.index.host:
            host.ages.look(host.num_evicted, now)

    def time_out_reads(self, timeout_s: float) -> None:
        """Give up all reads from each tier whose oldest read in flight has taken *timeout_s* or longer.

        Call this instead of `Fetch.time_out` at the deadline of a fetch whose reads may still be queued. Such a fetch
        may be late because the queue is long, although no read hangs.
        """
        self._cold_reads.time_out_late(timeout_s)

    def _clear(self, *, is_event: bool) -> None:
        """Evict all blocks, and start to delete their records. *is_event* is as for `LowerIndex.clear_host`."""
        self._index_load.stop()
        self.index.clear_host(is_event=is_event)
        self.index.clear_disk(is_event=is_event)
        self._clearing.begin()
        if self._remote is not None:
            self._remote.clear()

    def _publish_row(
        self, group_id: int, slots: Ids, row: NamedSpan, digests: Sequence[bytes], owners: OwnerNumbers
    ) -> Ids:
        """Publish consecutive blocks of one prompt, and return their slots without those of duplicates."""
        own = slots[row.start : row.end]
        names = row.names[::-1] if row.parent is None else [row.parent, *reversed(row.names)]
        taken = self.index.add_chain_to_host(
            group_id,
            own[::-1],
            names,
            len(names) - len(own),
            b"".join(reversed(digests[row.start : row.end])),
            owners[row.start : row.end][::-1],
        )
        return np.delete(own, [len(own) - 1 - place for place in taken]) if taken else own
