"""LocalTiers: host memory and disk in this process."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from kvtier.store.record import Fault
from kvtier.tiers.device.block_pool import ABSENT, NOTHING, BlockPool, Ids
from kvtier.tiers.device.runs import Row
from kvtier.tiers.lower.clean_ahead import CleanAhead
from kvtier.tiers.lower.disk_probe import DiskProbe
from kvtier.tiers.lower.disk_reads import DiskReads
from kvtier.tiers.lower.disk_spill import DiskSpill
from kvtier.tiers.lower.disk_tier import DiskTier, NoDisk
from kvtier.tiers.lower.index_load import IndexLoad
from kvtier.tiers.lower.local_fetch import LocalFetch
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.lower.lower_tiers import Lost, LowerStatistics, LowerTiers, Places, Saving, Tell
from kvtier.tiers.lower.no_tiers import NoTiers
from kvtier.tiers.lower.statistics import slot_statistics
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.events import EventLog
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tenant import OwnerNumbers, tenant_with
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.lane_speed import LaneSpeed
from kvtier.transfer.transfer_engine import Route, TransferEngine

LEAST_CLEAN_AHEAD = 32  # host blocks at the eviction end that are on disk already, before anything has been measured


def lower_tiers(
    groups: Sequence[AttentionGroup],
    memories: Sequence[BlockMemory],
    transfers: TransferEngine,
    disk: DiskTier | None = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    quotas: Mapping[bytes, int] = MappingProxyType({}),
    events: EventLog | None = None,
) -> LowerTiers:
    """What is below the device in this process: `LocalTiers`, or `NoTiers` without host memory.

    ValueError for a disk without host memory: it is read into that.
    """
    if all(memory.num_host_slots for memory in memories):
        return LocalTiers(groups, memories, transfers, disk, clock, quotas=quotas, events=events)
    if disk is not None:
        raise ValueError("disk tier: needs a host tier to read into; give the host some capacity or leave out the disk")
    return NoTiers(len(groups))


class LocalTiers:
    """See `LowerTiers`. Copies between host memory and disk go by *transfers*, whose owner polls it: the thread that
    owns these tiers too."""

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        memories: Sequence[BlockMemory],
        transfers: TransferEngine,
        disk: DiskTier | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        quotas: Mapping[bytes, int] = MappingProxyType({}),
        events: EventLog | None = None,
    ) -> None:
        """*memories*, by group, have the host slots. *quotas*: bytes of host memory by tenant. *events*: where to tell
        which block came and went."""
        self.num_slots = [memory.num_host_slots for memory in memories]
        self._block_bytes = [memory.block_bytes for memory in memories]
        self._transfers = transfers
        pools = [BlockPool(num_slots) for num_slots in self.num_slots]
        self._disk = NoDisk(clock) if disk is None else disk
        self.index = LowerIndex(groups, pools, self._block_bytes, self._disk, quotas, events)
        # At most a quarter of the pool: within the window dirty blocks are skipped, beyond it the order is strict.
        self._windows = [CleanAhead(LEAST_CLEAN_AHEAD, max(1, num_slots // 4), clock) for num_slots in self.num_slots]
        self._disk_spill = DiskSpill(self.index, memories, transfers, self._windows, clock)
        self._disk_reads = DiskReads(
            self.index, memories, transfers, self._windows, lambda: self._disk_spill.is_moving, clock
        )
        self._disk_probe = DiskProbe(self.index, self._block_bytes, transfers, clock)
        self._index_load = IndexLoad(self.index, transfers, clock)
        self._fetches: set[LocalFetch] = set()  # that lease or wait for something
        self._reading: set[LocalFetch] = set()  # those that wait for blocks wanted now
        self._news: list[tuple[LocalFetch, int, Reason | None]] = []
        self._reserved = [0 for _ in memories]
        self._unmet = [0 for _ in memories]  # slots asked for and not had since `spill`
        self._index_load.go_on()

    @property
    def num_changes(self) -> int:
        return self.index.host.num_changes

    @property
    def epoch(self) -> int:
        return self.index.epoch

    @property
    def is_known(self) -> bool:
        return self._disk.index.is_loaded

    @property
    def is_in_order(self) -> bool:
        return self._disk.is_readable

    @property
    def is_making_room(self) -> bool:
        return self._disk_spill.is_moving

    def find(self, group_id: int, names: Sequence[BlockName]) -> Places:
        return self.index.find(group_id, names)

    def find_run(self, group_id: int, names: Sequence[BlockName]) -> Places:
        return self.index.find_run(group_id, names)

    def fetch(
        self,
        group_id: int,
        blocks: NamedBlocks,
        tell: Tell,
        found: Places | None = None,
    ) -> LocalFetch:
        return self._begin(group_id, blocks, tell, found, now=True)

    def fetch_later(self, group_id: int, blocks: NamedBlocks, tell: Tell) -> LocalFetch:
        return self._begin(group_id, blocks, tell, None, now=False)

    def reserve(self, group_id: int, num_slots: int) -> list[int]:
        host, window = self.index.host, self._windows[group_id]
        if not self._disk.is_failing:
            slots = host.take_clean(group_id, num_slots, window.num_blocks)
        else:
            num_free = host.pools[group_id].num_free
            slots = host.take(group_id, min(num_slots, num_free), window.num_blocks) or []
        window.allocated(len(slots))
        self._unmet[group_id] += num_slots - len(slots)
        self._reserved[group_id] += len(slots)
        return slots

    def publish(
        self, group_id: int, slots: Ids, rows: Sequence[Row], digests: Sequence[bytes], owners: OwnerNumbers
    ) -> None:
        come = [self._publish_row(group_id, slots, row, digests, owners) for row in rows]
        self.index.used_in_host(group_id, np.concatenate([NOTHING, *come]).tolist())
        self.abandon(group_id, slots)
        if self.index.quotas.any:
            for number in np.unique(owners).tolist():
                self.index.keep_quota(group_id, tenant_with(number))

    def abandon(self, group_id: int, slots: Ids) -> None:
        self._reserved[group_id] -= len(slots)
        self.index.host.pools[group_id].release(slots)

    def refresh(self, group_id: int, names: Sequence[BlockName], were_read: Sequence[bool]) -> None:
        slots = self.index.host.pools[group_id].find_all(names)
        in_host = slots[slots != ABSENT]
        self.index.host.pools[group_id].refresh(in_host)
        self.index.used_in_host(group_id, in_host.tolist())
        disk = self._disk
        keys = [disk.key(group_id, name) for name, was_read in zip(names, were_read, strict=False) if was_read]
        if keys:  # not done while the lane to disk is full
            self._transfers.submit(Route.HOST_TO_DISK, lambda: disk.touch(keys), 0, lambda transfer: None)

    def keep(self, group_id: int, places: Places) -> None:
        self.index.host.pools[group_id].refresh(places[places >= 0][::-1])

    def forget(self, group_id: int, names: Sequence[BlockName]) -> None:
        self.index.host.corrupt[Fault.CORRUPT.value] += len(names)
        slots = self.index.host.pools[group_id].find_all(names)
        self.index.host.evict(group_id, slots[slots != ABSENT])

    def clear(self) -> bool:
        num_read = sum(self._disk_reads.num_leases(group_id) for group_id in range(len(self.num_slots)))
        if num_read or any(self._reserved) or self._disk_spill.copies.batches:
            return False
        if self._disk.is_there and not self._disk.clear():
            return False
        for fetch in list(self._fetches):
            fetch.release(range(len(fetch.slots)))
        self.index.clear()
        return True

    def spill(self) -> None:
        if not self._reading or not self._is_roomy():
            self._disk_spill.spill()
        self._unmet = [0 for _ in self._unmet]

    def poll(self) -> None:
        self._index_load.go_on()
        self._disk_probe.go_on()
        self.index.keep_quotas()
        self._disk_reads.pump()
        news, self._news = self._news, []
        for fetch, place, failure in news:
            if failure is not None or fetch.slots[place] != ABSENT:  # else it was released meanwhile
                fetch.tell(fetch, place, failure)

    def take_lost(self) -> Sequence[Lost]:
        return self.index.take_lost()

    def read_speed(self) -> LaneSpeed:
        return self._transfers.speed(Route.DISK_TO_HOST)

    def queued_read_bytes(self) -> int:
        return self._disk_reads.queued_bytes + self._transfers.pending_bytes(Route.DISK_TO_HOST)

    def saving(self) -> Saving:
        spill = self._disk_spill
        return Saving(
            is_there=self._disk.is_there,
            is_possible=not self._disk.is_failing,
            num_left=spill.num_dirty,
            num_done=spill.num_stored,
            is_busy=bool(spill.copies.batches),
            ended_at=spill.copies.ended_at,
        )

    def statistics(self) -> LowerStatistics:
        host = slot_statistics(self.index.host, self._block_bytes)
        host_tenants = self.index.quotas.num_bytes
        if not self._disk.is_there:
            return LowerStatistics({Tier.HOST: host}, host_tenants=host_tenants)
        return LowerStatistics(
            {Tier.HOST: host, Tier.DISK: self._disk.statistics()},
            self._disk.details(),
            self.index.admission.statistics(),
            host_tenants,
        )

    def check(self) -> None:
        self.index.check()
        self._disk_reads.check()
        for group_id, pool in enumerate(self.index.host.pools):
            fetched = sum(fetch.num_leased for fetch in self._fetches if fetch.group_id == group_id)
            written, read = self._disk_spill.copies.num_leases(group_id), self._disk_reads.num_leases(group_id)
            expected = fetched + written + read + self._reserved[group_id]
            assert pool.num_leases == expected, f"host: {pool.num_leases} leases, {expected} accounted for"
        assert all(fetch.num_leased or fetch.is_reading for fetch in self._fetches), "a fetch that is over is kept"
        assert self._reading <= self._fetches, "a fetch that is over waits for something"

    def _begin(self, group_id: int, blocks: NamedBlocks, tell: Tell, found: Places | None, now: bool) -> LocalFetch:
        fetch = LocalFetch(group_id, blocks, self.index, self._disk_reads, tell, self._came, self._ended)
        fetch.lease(self.index.host.pools[group_id].find_all(blocks.names) if found is None else found)
        if fetch.num_leased < len(fetch.slots):
            if self._disk.is_there:
                if now:
                    self._reading.add(fetch)
                fetch.read(now)
                self._disk_reads.pump()
            else:
                for place in np.flatnonzero(fetch.slots == ABSENT).tolist():
                    fetch.fail(place, Reason.EVICTED_FROM_HOST)
        if fetch.num_leased or fetch.is_reading:
            self._fetches.add(fetch)
        return fetch

    def _publish_row(self, group_id: int, slots: Ids, row: Row, digests: Sequence[bytes], owners: OwnerNumbers) -> Ids:
        """The slots of a row's blocks, without those of blocks that another slot has."""
        own = slots[row.start : row.end]
        names = row.names[::-1] if row.parent is None else [row.parent, *reversed(row.names)]
        taken = self.index.came_to_host(
            group_id,
            own[::-1],
            names,
            len(names) - len(own),
            b"".join(reversed(digests[row.start : row.end])),
            owners[row.start : row.end][::-1],
        )
        return np.delete(own, [len(own) - 1 - place for place in taken]) if taken else own

    def _is_roomy(self) -> bool:
        """Whether each pool could give a window of slots, and what was asked for in vain, and lose no last copy."""
        return all(
            self.index.host.num_clean(group_id, window.num_blocks + unmet) >= window.num_blocks + unmet
            for group_id, (window, unmet) in enumerate(zip(self._windows, self._unmet, strict=True))
        )

    def _came(self, fetch: LocalFetch, place: int, failure: Reason | None) -> None:
        self._news.append((fetch, place, failure))
        if not fetch.is_reading:
            self._reading.discard(fetch)
            if not fetch.num_leased:
                self._ended(fetch)

    def _ended(self, fetch: LocalFetch) -> None:
        self._fetches.discard(fetch)
        self._reading.discard(fetch)
