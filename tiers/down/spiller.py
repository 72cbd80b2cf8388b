"""Spiller: keeps the eviction end of device and host copied down, ahead of need and never in anyone's way."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.store.blob_store import Blob, StoreFull
from kvtier.store.record import digest_among
from kvtier.tiers.device.block_pool import NOTHING, Ids
from kvtier.tiers.device.runs import Row
from kvtier.tiers.down.clean_ahead import CleanAhead
from kvtier.tiers.lower.breaker import HUNG_S, Attempt
from kvtier.tiers.lower.residency import Residency, SlotTier
from kvtier.tiers.lower.tenants import OwnerNumbers, tenant_with
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

BATCH_BYTES = 8 << 20
MOST_IN_BATCH = 128  # blocks: half a millisecond's work of the owner when they have been copied …
MOST_IN_DISK_BATCH = 64  # … also where each is asked about on its way to disk
MOST_STARTED = 256  # blocks in one call: the rest in the next
MOST_BEYOND = 64  # the part of the device's slots that may be copied down before their time comes, for larger batches
# Batches under way at most: to host a step's worth of large blocks, to disk enough to keep it busy.
MAX_IN_FLIGHT = {Route.DEVICE_TO_HOST: 16, Route.HOST_TO_DISK: 4}
PATIENCE_S = 1.0  # after which nobody waits for a copy any more
BACK_OFF_S = 1.0  # after a batch that failed to leave the device; the device keeps serving


@dataclass(eq=False, slots=True)
class Batch:
    """Blocks on their way down, in the order in which they should be evicted below. Their upper slots are leased, and
    their lower ones if the host is the target."""

    group_id: int
    rows: Sequence[Row]
    upper_slots: Ids
    spots: npt.NDArray[np.int64]  # of the upper slots: see `BlockPool.spots`
    lower_slots: Ids
    tenants: OwnerNumbers
    submitted_at: float
    attempt: Attempt | None  # at writing to disk
    # Names that batches told of before this one have pushed out of the disk. They came before it there or after, so the
    # block may be gone: it counts as gone.
    pushed_out: set[BlockName] = field(default_factory=set)
    names: Sequence[BlockName] = field(init=False)

    def __post_init__(self) -> None:
        self.names = [name for row in self.rows for name in row.names]


@dataclass(frozen=True, slots=True)
class CleanFront:
    """What was found when the eviction end of a pool was looked through: so many slots were clean or on their way."""

    num_slots: int = 0
    num_departures: int = 0  # of the pool by then: as many of those slots may be gone since as it has more
    num_lost: int = 0  # of the tier by then: if it has more, what was clean may be so no longer


class Spiller:
    """Copies blocks down while lanes are idle. Owned by the cache's thread.

    From the device go only blocks among the oldest `CleanAhead.num_blocks`: what is asked for again before that costs
    nothing, and host memory holds what the device does not. From the host goes everything, what came first goes first:
    nearly all of it would have to in the end, and a host that is clean never keeps a load waiting.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        residency: Residency,
        memories: Sequence[BlockMemory],
        transfers: TransferEngine,
        window: CleanAhead,
        clock: Callable[[], float],
    ) -> None:
        self._groups = groups
        self._residency = residency
        self._memories = memories
        self._transfers = transfers
        self._window = window
        self._clock = clock
        self.num_stored = 0  # blocks that have been written to disk
        self._in_flight: dict[Route, list[Batch]] = {Route.DEVICE_TO_HOST: [], Route.HOST_TO_DISK: []}
        self._ended_at = dict.fromkeys(self._in_flight, float("-inf"))  # when a batch last did
        self._not_before = 0.0
        self._clean_fronts = [CleanFront() for _ in groups]

    def spill_device(self, demand: Sequence[int]) -> None:
        """Start copies to host that are due. *demand*: for each group, slots about to be taken beyond the usual.

        Half of the window is headroom: for that the bus is left to promotions while there are any.
        """
        if self._residency.host is None:
            return
        ahead, is_bus_free = self._window.depth, not self._transfers.num_pending(Route.HOST_TO_DEVICE)
        if not is_bus_free:
            ahead = -(-ahead // 2)
        for group_id, wanted in enumerate(demand):
            pool = self._residency.device.pools[group_id]
            window = ahead + wanted + pool.num_reserved
            if not self._is_clean(group_id, window):
                self._clean(group_id, window, self._beyond(group_id) if is_bus_free else 0)
            short = ahead + wanted - pool.num_free
            if short > 0:  # what running requests leave will be taken at once
                self.copy_down(group_id, self._residency.device.dirty[group_id].oldest(2 * short))

    def copy_down(self, group_id: int, slots: Sequence[int] | Ids) -> None:
        """Start copying those of these device slots to host that have no copy below, whoever leases them. A chain's
        front comes first."""
        pool, ids = self._residency.device.pools[group_id], np.array(slots, np.intp)
        ids = ids[pool.are_named(ids)]
        ids = ids[np.isin(ids, self._on_the_way(Route.DEVICE_TO_HOST, group_id), invert=True)]
        ids = ids[:MOST_STARTED]
        while len(ids):
            most = self._most(Route.DEVICE_TO_HOST, group_id, pool.num_slots)
            if not self._start_to_host(group_id, ids[:most][::-1]):
                break
            ids = ids[most:]

    def spill_host(self) -> None:
        """Start copies to disk that are due."""
        if self._residency.disk is not None:
            for batch in self._in_flight[Route.HOST_TO_DISK]:
                if batch.attempt is not None and self._clock() - batch.submitted_at > HUNG_S:
                    self._residency.disk.writing.hung(batch.attempt)
            for group_id in range(len(self._memories)):
                num_started = 0
                while num_started < MOST_STARTED and (num_more := self._start_to_disk(group_id)):
                    num_started += num_more

    def host_is_roomy(self, demand: Sequence[int]) -> bool:
        """Whether the host could take a window of blocks, and the *demand* by group, without losing a last copy."""
        host, window = self._residency.host, self._window.num_blocks
        return host is None or all(
            self._residency.num_clean(host, group_id, window + wanted) >= window + wanted
            for group_id, wanted in enumerate(demand)
        )

    def is_moving(self, *routes: Route, patience_s: float = PATIENCE_S) -> bool:
        """Whether copies are under way on one of the *routes*, by default on any, that are not suspiciously late: it
        makes sense to wait for their slots.

        Behind one that is late none is waited for, unless some have got past it lately.
        """
        return any(self._moves(route, self._clock() - patience_s) for route in routes or self._in_flight)

    def _moves(self, route: Route, since: float) -> bool:
        submitted = [batch.submitted_at for batch in self._in_flight[route]]
        disk = self._residency.disk
        if not submitted or (route is Route.HOST_TO_DISK and disk is not None and disk.is_failing):
            return False
        return min(submitted) > since or (max(submitted) > since and self._ended_at[route] > since)

    @property
    def is_busy(self) -> bool:
        """Whether copies down are under way."""
        return any(self._in_flight.values())

    def hangs_since(self, began_at: float) -> bool:
        """Whether copies down are under way, and on each lane that has some none has ended for so long, nor since
        *began_at*, that none will."""
        since = self._clock() - HUNG_S
        busy = [route for route, batches in self._in_flight.items() if batches]
        return bool(busy) and all(max(began_at, self._ended_at[route]) < since for route in busy)

    def num_dirty(self) -> int:
        """Blocks of device and host without a copy below; 0 without a disk, where nothing can be kept anyway."""
        residency = self._residency
        if residency.disk is None or residency.host is None:
            return 0
        return sum(len(dirty) for tier in (residency.device, residency.host) for dirty in tier.dirty)

    def num_leases(self, tier: SlotTier, group_id: int) -> int:
        """Leases that batches under way hold on a pool."""
        upper = Route.DEVICE_TO_HOST if tier is self._residency.device else Route.HOST_TO_DISK
        leases = sum(len(batch.upper_slots) for batch in self._in_flight[upper] if batch.group_id == group_id)
        if tier is self._residency.host:
            below = self._in_flight[Route.DEVICE_TO_HOST]
            leases += sum(len(batch.lower_slots) for batch in below if batch.group_id == group_id)
        return leases

    def _is_clean(self, group_id: int, window: int) -> bool:
        """Whether the *window* slots to be evicted next are known to be clean or on their way, without a look."""
        device, known = self._residency.device, self._clean_fronts[group_id]
        num_gone = device.pools[group_id].num_departures - known.num_departures
        return known.num_slots - num_gone >= window and known.num_lost == device.num_lost

    def _beyond(self, group_id: int) -> int:
        """How many blocks beyond those that are due to copy with them: a batch, so that the next ones that are due are
        a batch too, and are looked for after as many allocations."""
        num_slots = self._residency.device.pools[group_id].num_slots
        return min(self._batch_blocks(Route.DEVICE_TO_HOST, group_id), num_slots // MOST_BEYOND)

    def _clean(self, group_id: int, window: int, beyond: int) -> None:
        """Start copying what is dirty among so many slots at the eviction end."""
        device = self._residency.device
        pool, num_lost = device.pools[group_id], device.num_lost
        oldest = pool.oldest(window + beyond)
        dirty = oldest[device.dirty[group_id].among(oldest)]
        is_all = len(dirty) <= MOST_STARTED
        dirty = dirty[:MOST_STARTED]
        while len(dirty):
            most = self._most(Route.DEVICE_TO_HOST, group_id)
            if not self._start_to_host(group_id, dirty[:most]):
                return
            dirty = dirty[most:]
        if is_all:
            self._clean_fronts[group_id] = CleanFront(len(oldest), pool.num_departures, num_lost)

    def _batch_blocks(self, route: Route, group_id: int) -> int:
        """How many blocks to copy in one go."""
        memory = self._memories[group_id]
        batch_bytes = BATCH_BYTES * (memory.num_copiers if route is Route.DEVICE_TO_HOST else 1)
        most = MOST_IN_BATCH if self._residency.disk is None else MOST_IN_DISK_BATCH
        return min(max(1, batch_bytes // memory.block_bytes), most)

    def _most(self, route: Route, group_id: int, num_lendable: int | None = None) -> int:
        """How many blocks the next batch may have; 0 if there is no room or no time for one.

        A spill leases its source: never more than a quarter of *num_lendable* slots, by default of those that are free,
        so that allocations find the rest.
        """
        under_way = [batch for batch in self._in_flight[route] if batch.group_id == group_id]
        if len(under_way) >= MAX_IN_FLIGHT[route] or not self._may_use(route):
            return 0
        num_lent = sum(len(batch.upper_slots) for batch in under_way)
        if num_lendable is None:
            num_lendable = self._upper(route).pools[group_id].num_free + num_lent
        most = min(self._batch_blocks(route, group_id), num_lendable // 4 - num_lent)
        return max(most, 0 if under_way else 1)

    def _start_to_host(self, group_id: int, slots: Ids) -> bool:
        """Start one batch of these device slots' blocks, without those that have a copy below after all; whether that
        was all: not if there are no slots, the host has too few, or the lane is full."""
        if not len(slots):
            return False
        pool, slots, rows = self._residency.device.pools[group_id], *self._without_copies(group_id, slots)
        if not len(slots):
            return True
        lower_slots = self._host_slots(group_id, len(slots))
        is_all = len(lower_slots) == len(slots)
        if not is_all:
            slots = slots[: len(lower_slots)]
            rows = pool.rows(slots)
        is_started = len(slots) > 0 and self._submit(
            Route.DEVICE_TO_HOST,
            Batch(
                group_id,
                rows,
                slots,
                pool.spots(slots),
                np.array(lower_slots, np.intp),
                self._residency.tenants.on_device(group_id, slots),
                self._clock(),
                None,
            ),
        )
        return is_started and is_all

    def _without_copies(self, group_id: int, slots: Ids) -> tuple[Ids, list[Row]]:
        """The device slots whose blocks have no copy below, and what is in them. The others are clean."""
        residency = self._residency
        pool = residency.device.pools[group_id]
        rows = pool.rows(slots)
        names = [name for row in rows for name in row.names]
        have = residency.have_copies_below_device(group_id, names)
        if not have.any():
            return slots, rows
        residency.device.dirty[group_id].remove(slots[have])
        return slots[~have], pool.rows(slots[~have])

    def _start_to_disk(self, group_id: int) -> int:
        """Start one batch of what is dirty in host memory; of how many blocks, 0 if there are none or it cannot be."""
        host, disk = self._residency.host, self._residency.disk
        assert host is not None, "a host route without a host"
        assert disk is not None, "a route to disk without a disk"
        pool = host.pools[group_id]
        slots = self._dirty_in_host(group_id, self._most(Route.HOST_TO_DISK, group_id))
        if not len(slots):
            return 0
        is_started = self._submit(
            Route.HOST_TO_DISK,
            Batch(
                group_id,
                pool.rows(slots),
                slots,
                pool.spots(slots),
                NOTHING,
                self._residency.host_blocks[group_id].tenants(slots),
                self._clock(),
                disk.writing.begin(),
            ),
        )
        return len(slots) if is_started else 0

    def _submit(self, route: Route, batch: Batch) -> bool:
        """Hand the batch to the route's lane; False, and all is as before, if that is full."""
        self._upper(route).pools[batch.group_id].lend(batch.upper_slots)
        self._in_flight[route].append(batch)
        work, deliver = self._work(route, batch)
        if not self._transfers.submit(
            route, work, len(batch.upper_slots) * self._memories[batch.group_id].block_bytes, deliver
        ):
            self._end(route, batch, LaneClosed())
            return False
        return True

    def _may_use(self, route: Route) -> bool:
        """Whether the route's lower end is in order, as far as is known."""
        if route is Route.HOST_TO_DISK:
            return self._residency.disk is not None and self._residency.disk.may_write()
        return self._clock() >= self._not_before

    def _dirty_in_host(self, group_id: int, most: int) -> Ids:
        """Up to *most* host slots that have no copy on disk and are not on their way there."""
        residency = self._residency
        assert residency.host is not None, "a host route without a host"
        assert residency.disk is not None, "a route to disk without a disk"
        pool, dirty = residency.host.pools[group_id], residency.host.dirty[group_id]
        on_the_way = self._on_the_way(Route.HOST_TO_DISK, group_id)
        slots = dirty.oldest(most + len(on_the_way)) if most else NOTHING
        slots = slots[np.isin(slots, on_the_way, invert=True)][:most]
        on_disk = [(name := pool.name(slot)) is not None and residency.disk.holds(group_id, name) for slot in slots]
        dirty.remove(slots[np.array(on_disk, np.bool_)])
        return slots[~np.array(on_disk, np.bool_)]

    def _on_the_way(self, route: Route, group_id: int) -> Ids:
        """Slots of the route's upper tier that are being copied."""
        batches = [batch.upper_slots for batch in self._in_flight[route] if batch.group_id == group_id]
        return np.concatenate([NOTHING, *batches])

    def _host_slots(self, group_id: int, num_slots: int) -> list[int]:
        """Host slots for blocks from the device; while the disk works, only such as lose nothing."""
        residency, window = self._residency, self._window.num_blocks
        assert residency.host is not None, "a route to the host without a host"
        if residency.disk is not None and not residency.disk.is_failing:
            return residency.take_clean(residency.host, group_id, num_slots, window)
        free = residency.host.pools[group_id].num_free
        return residency.take(residency.host, group_id, min(num_slots, free), window) or []

    def _work(self, route: Route, batch: Batch) -> tuple[Callable[[], object], Callable[[Transfer], None]]:
        """What the lane does, with nothing but memory and values, and what the owner does with its outcome."""
        memory = self._memories[batch.group_id]
        if route is Route.DEVICE_TO_HOST:

            def copy_down() -> list[bytes]:
                lower_slots = batch.lower_slots.tolist()
                memory.to_host(batch.upper_slots.tolist(), lower_slots)
                digest = digest_among(memory.num_copiers)
                return [digest(memory.host_block(slot)) for slot in lower_slots]

            return copy_down, lambda transfer: self._copied_to_host(batch, transfer)

        disk = self._residency.disk
        assert disk is not None, "a route to disk without a disk"
        digest_of = self._residency.host_blocks[batch.group_id].digest
        slots = batch.upper_slots.tolist()
        blobs = [
            Blob(
                disk.key(batch.group_id, name),
                digest_of(slot),
                memory.host_block(slot),
                b"" if origin.parent is None else disk.key(batch.group_id, origin.parent),
                origin.tenant,
            )
            for name, slot in zip(batch.names, slots, strict=True)
            for origin in [self._residency.origin_in_host(batch.group_id, slot)]
        ]
        return lambda: disk.write(blobs), lambda transfer: self._written_to_disk(batch, transfer)

    def _copied_to_host(self, batch: Batch, transfer: Transfer) -> None:
        host, device = self._residency.host, self._residency.device
        assert host is not None, "a batch was copied to a host tier that is not there"
        if transfer.error is None:
            self._window.spilled(self._clock() - batch.submitted_at)
            pool = device.pools[batch.group_id]
            is_there = pool.spots(batch.upper_slots) == batch.spots  # else it was evicted on purpose meanwhile
            rows = batch.rows if is_there.all() else [row for row in _single_rows(batch.rows) if is_there[row.start]]
            copied = [self._row_copied(batch, row, transfer.result) for row in rows]
            if self._residency.disk is not None:
                self._residency.used_in_host(batch.group_id, np.concatenate([NOTHING, *copied]).tolist())
            device.dirty[batch.group_id].remove(batch.upper_slots[is_there])
        self._end(Route.DEVICE_TO_HOST, batch, transfer.error)
        if self._residency.tenants.any_quotas:
            for number in np.unique(batch.tenants).tolist():
                self._residency.keep_quota(batch.group_id, tenant_with(number))

    def _row_copied(self, batch: Batch, row: Row, digests: Sequence[bytes]) -> Ids:
        """A row of the batch is in host memory; its slots there, without those of blocks that another slot has."""
        slots = batch.lower_slots[row.start : row.end]
        names = row.names[::-1] if row.parent is None else [row.parent, *reversed(row.names)]
        taken = self._residency.came_to_host(
            batch.group_id,
            slots[::-1],
            names,
            len(names) - len(slots),
            b"".join(reversed(digests[row.start : row.end])),
            batch.tenants[row.start : row.end][::-1],
        )
        return np.delete(slots, [len(slots) - 1 - place for place in taken]) if taken else slots

    def _written_to_disk(self, batch: Batch, transfer: Transfer) -> None:
        host, disk = self._residency.host, self._residency.disk
        assert host is not None, "a batch left a host tier that is not there"
        assert disk is not None, "a batch was written to a disk that is not there"
        if transfer.error is None:
            disk.on_written(transfer.result)
            self.num_stored += len(batch.names)
            is_there = host.pools[batch.group_id].spots(batch.upper_slots) == batch.spots
            host.dirty[batch.group_id].remove(batch.upper_slots[is_there])
            there = [name for name in batch.names if name not in batch.pushed_out]
            self._pushed_out_of_disk(batch, transfer.result.evicted)
            self._residency.came_to_disk(batch.group_id, there, transfer.result.evicted)
        elif isinstance(transfer.error, StoreFull):
            self._pushed_out_of_disk(batch, transfer.error.evicted)
            self._residency.came_to_disk(batch.group_id, (), transfer.error.evicted)
        self._end(Route.HOST_TO_DISK, batch, transfer.error)

    def _pushed_out_of_disk(self, batch: Batch, keys: Sequence[bytes]) -> None:
        """Tell the other batches at writing: two writers' outcomes come in any order."""
        disk = self._residency.disk
        others = [other for other in self._in_flight[Route.HOST_TO_DISK] if other is not batch]
        if disk is not None and others and keys:
            blocks = {block for key in keys if (block := disk.block_of(key)) is not None}
            for other in others:
                other.pushed_out.update(name for name in other.names if (other.group_id, name) in blocks)

    def _end(self, route: Route, batch: Batch, error: BaseException | None) -> None:
        self._in_flight[route].remove(batch)
        self._ended_at[route] = self._clock()
        disk = self._residency.disk
        if batch.attempt is not None and disk is not None:
            if error is None:
                disk.writing.succeeded(batch.attempt)
            elif isinstance(error, LaneClosed):
                disk.writing.withdrawn(batch.attempt)
            else:
                disk.writing.failed(batch.attempt)
        elif error is not None:
            self._clean_fronts[batch.group_id] = CleanFront()
            if not isinstance(error, LaneClosed):
                self._not_before = self._clock() + BACK_OFF_S
        self._upper(route).pools[batch.group_id].put_back(batch.upper_slots)
        if len(batch.lower_slots) and self._residency.host is not None:
            self._residency.host.pools[batch.group_id].release(batch.lower_slots)

    def _upper(self, route: Route) -> SlotTier:
        upper = self._residency.device if route is Route.DEVICE_TO_HOST else self._residency.host
        assert upper is not None, f"{route} without its upper tier"
        return upper


def _single_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """The same blocks, each a row by itself."""
    for row in rows:
        parents = [*row.names[1:], row.parent]
        for start, (name, parent) in enumerate(zip(row.names, parents, strict=True), row.start):
            yield Row(start, start + 1, [name], parent)
