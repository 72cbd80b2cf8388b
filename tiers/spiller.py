"""Spiller: keeps the eviction end of device and host copied down, ahead of need and never in anyone's way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from kvtier.store.blob_store import Blob, StoreFull
from kvtier.store.record import digest_among
from kvtier.tiers.block_hash import BlockName
from kvtier.tiers.breaker import HUNG_S, Attempt
from kvtier.tiers.clean_ahead import CleanAhead
from kvtier.tiers.groups import AttentionGroup
from kvtier.tiers.residency import Residency, SlotTier
from kvtier.tiers.tenants import Ties
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

BATCH_BYTES = 8 << 20
# Batches under way at most: to host a step's worth of large blocks, to disk enough to keep it busy.
MAX_IN_FLIGHT = {Route.DEVICE_TO_HOST: 16, Route.HOST_TO_DISK: 4}
PATIENCE_S = 1.0  # after which nobody waits for a copy any more
BACK_OFF_S = 1.0  # after a batch that failed to leave the device; the device keeps serving


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks on their way down. Their upper slots are leased, and their lower ones if the host is the target."""

    group_id: int
    names: tuple[BlockName, ...]
    upper_slots: tuple[int, ...]
    lower_slots: tuple[int, ...]
    ties: tuple[Ties, ...]
    submitted_at: float
    attempt: Attempt | None  # at writing to disk
    # Names that batches told of before this one have pushed out of the disk. They came before it there or after, so the
    # block may be gone: it counts as gone.
    pushed_out: set[BlockName] = field(default_factory=set, compare=False)


class Spiller:
    """Copies blocks down while lanes are idle. Owned by the cache's thread.

    From the device go only blocks among the oldest `CleanAhead.num_blocks`: what is asked for again before that costs
    nothing, and host memory holds what the device does not. From the host goes everything, oldest arrival first:
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
        self.num_stored = 0  # blocks that have landed on disk
        self._in_flight: dict[Route, list[Batch]] = {Route.DEVICE_TO_HOST: [], Route.HOST_TO_DISK: []}
        self._ended_at = dict.fromkeys(self._in_flight, float("-inf"))  # when a batch last did
        self._not_before = 0.0

    def spill_device(self, demand: Sequence[int]) -> None:
        """Start copies to host that are due. *demand*: for each group, slots about to be taken beyond the usual.

        Half of the window is headroom: for that the bus is left to promotions while there are any.
        """
        if self._residency.host is not None:
            ahead = self._window.depth
            if self._transfers.num_pending(Route.HOST_TO_DEVICE):
                ahead = -(-ahead // 2)
            for group_id, wanted in enumerate(demand):
                pool = self._residency.device.pools[group_id]
                window = ahead + wanted + pool.num_reserved
                while self._start(Route.DEVICE_TO_HOST, group_id, partial(self._dirty_on_device, window)):
                    pass
                short = ahead + wanted - pool.num_free
                if short > 0:  # what running requests leave will be taken at once
                    oldest_leased = islice(self._residency.device.dirty[group_id], 2 * short)
                    self.copy_down(group_id, list(oldest_leased))

    def copy_down(self, group_id: int, slots: Sequence[int]) -> None:
        """Start copying those of these device slots to host that have no copy below, whoever leases them."""

        def find_dirty(group_id: int, most: int) -> list[int]:
            pool, on_the_way = self._residency.device.pools[group_id], self._on_the_way(Route.DEVICE_TO_HOST, group_id)
            return [
                slot
                for slot in slots
                if slot not in on_the_way
                and (name := pool.name(slot)) is not None
                and not self._residency.has_copy_below_device(group_id, name)
            ][:most]

        num_slots = self._residency.device.pools[group_id].num_slots
        while self._residency.host is not None and self._start(Route.DEVICE_TO_HOST, group_id, find_dirty, num_slots):
            pass

    def spill_host(self) -> None:
        """Start copies to disk that are due."""
        if self._residency.disk is not None:
            for batch in self._in_flight[Route.HOST_TO_DISK]:
                if batch.attempt is not None and self._clock() - batch.submitted_at > HUNG_S:
                    self._residency.disk.writing.hung(batch.attempt)
            for group_id in range(len(self._memories)):
                while self._start(Route.HOST_TO_DISK, group_id, self._dirty_in_host):
                    pass

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
        """Whether copies down are under way, and none has ended for so long, nor since *began_at*, that none will."""
        last = max(began_at, *self._ended_at.values())
        return self.is_busy and self._clock() - last > HUNG_S

    def num_dirty(self) -> int:
        """Blocks of device and host without a copy below; 0 without a disk, where nothing can be kept anyway."""
        residency = self._residency
        if residency.disk is None or residency.host is None:
            return 0
        return sum(len(dirty) for tier in (residency.device, residency.host) for dirty in tier.dirty)

    def num_leases(self, tier: SlotTier, group_id: int) -> int:
        """Leases that batches under way hold on a pool."""
        upper = Route.DEVICE_TO_HOST if tier is self._residency.device else Route.HOST_TO_DISK
        leases = sum(len(batch.names) for batch in self._in_flight[upper] if batch.group_id == group_id)
        if tier is self._residency.host:
            below = self._in_flight[Route.DEVICE_TO_HOST]
            leases += sum(len(batch.names) for batch in below if batch.group_id == group_id)
        return leases

    def _start(
        self,
        route: Route,
        group_id: int,
        find_dirty: Callable[[int, int], list[int]],
        num_lendable: int | None = None,
    ) -> bool:
        """Start one batch; False if there is nothing to copy, or no room or no time to.

        A spill leases its source: never more than a quarter of *num_lendable* slots, by default of those that are free,
        so that allocations find the rest.
        """
        under_way = [batch for batch in self._in_flight[route] if batch.group_id == group_id]
        if len(under_way) >= MAX_IN_FLIGHT[route] or not self._may_use(route):
            return False
        pool = self._upper(route).pools[group_id]
        num_lent = sum(len(batch.names) for batch in under_way)
        num_lendable = pool.num_free + num_lent if num_lendable is None else num_lendable
        memory = self._memories[group_id]
        batch_bytes = BATCH_BYTES * (memory.num_copiers if route is Route.DEVICE_TO_HOST else 1)
        most = min(max(1, batch_bytes // memory.block_bytes), num_lendable // 4 - num_lent)
        most = max(most, 0 if under_way else 1)
        dirty = find_dirty(group_id, most)
        lower_slots: list[int] = []
        if route is Route.DEVICE_TO_HOST and dirty:
            lower_slots = self._host_slots(group_id, len(dirty))
            dirty = dirty[: len(lower_slots)]
        if not dirty:
            return False
        names = tuple(name for slot in dirty if (name := pool.name(slot)) is not None)
        disk = self._residency.disk if route is Route.HOST_TO_DISK else None
        batch = Batch(
            group_id,
            names,
            tuple(dirty),
            tuple(lower_slots),
            self._ties(route, group_id, dirty),
            self._clock(),
            None if disk is None else disk.writing.begin(),
        )
        pool.lend(dirty)
        self._in_flight[route].append(batch)
        work, deliver = self._work(route, batch)
        num_bytes = len(dirty) * self._memories[group_id].block_bytes
        if not self._transfers.submit(route, work, num_bytes, deliver):
            self._end(route, batch, LaneClosed())
            return False
        return True

    def _may_use(self, route: Route) -> bool:
        """Whether the route's lower end is in order, as far as is known."""
        if route is Route.HOST_TO_DISK:
            return self._residency.disk is not None and self._residency.disk.may_write()
        return self._clock() >= self._not_before

    def _ties(self, route: Route, group_id: int, slots: Sequence[int]) -> tuple[Ties, ...]:
        """The blocks' ties. No parent where a group forgets: it needs no more than its window."""
        if route is Route.HOST_TO_DISK:
            return tuple(map(self._residency.host_blocks[group_id].ties, slots))
        pool, tenants = self._residency.device.pools[group_id], self._residency.tenants
        forgets = self._groups[group_id].forgets
        return tuple(Ties(None if forgets else pool.parent(slot), tenants.on_device(group_id, slot)) for slot in slots)

    def _dirty_on_device(self, window: int, group_id: int, most: int) -> list[int]:
        """Up to *most* of the *window* oldest cached slots that have no copy below."""
        residency = self._residency
        pool, marks = residency.device.pools[group_id], residency.device.dirty[group_id]
        dirty: list[int] = []
        for slot in pool.oldest(window).tolist():
            if len(dirty) == most:
                break
            if slot not in marks or (name := pool.name(slot)) is None:
                continue
            if residency.has_copy_below_device(group_id, name):
                del marks[slot]
            else:
                dirty.append(slot)
        return dirty

    def _dirty_in_host(self, group_id: int, most: int) -> list[int]:
        """Up to *most* host slots that have no copy on disk and are not on their way there."""
        residency = self._residency
        assert residency.host is not None, "a host route without a host"
        assert residency.disk is not None, "a route to disk without a disk"
        pool, marks = residency.host.pools[group_id], residency.host.dirty[group_id]
        on_the_way = self._on_the_way(Route.HOST_TO_DISK, group_id)
        dirty: list[int] = []
        for slot in list(islice(marks, most + len(on_the_way))):
            name = pool.name(slot)
            if slot in on_the_way or name is None or len(dirty) == most:
                continue
            if residency.disk.holds(group_id, name):
                del marks[slot]
            else:
                dirty.append(slot)
        return dirty

    def _on_the_way(self, route: Route, group_id: int) -> set[int]:
        """Slots of the route's upper tier that are being copied."""
        batches = [batch for batch in self._in_flight[route] if batch.group_id == group_id]
        return {slot for batch in batches for slot in batch.upper_slots}

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
                memory.to_host(batch.upper_slots, batch.lower_slots)
                digest = digest_among(memory.num_copiers)
                return [digest(memory.host_block(slot)) for slot in batch.lower_slots]

            return copy_down, lambda transfer: self._landed_in_host(batch, transfer)

        disk = self._residency.disk
        assert disk is not None, "a route to disk without a disk"
        digest_of = self._residency.host_blocks[batch.group_id].digest
        blobs = [
            Blob(
                disk.key(batch.group_id, name),
                digest_of(slot),
                memory.host_block(slot),
                b"" if ties.parent is None else disk.key(batch.group_id, ties.parent),
                ties.tenant,
            )
            for name, slot, ties in zip(batch.names, batch.upper_slots, batch.ties, strict=True)
        ]
        return lambda: disk.write(blobs), lambda transfer: self._landed_on_disk(batch, transfer)

    def _landed_in_host(self, batch: Batch, transfer: Transfer) -> None:
        host, device = self._residency.host, self._residency.device
        assert host is not None, "a batch landed in a host tier that is not there"
        if transfer.error is None:
            self._window.spilled(self._clock() - batch.submitted_at)
            landed = zip(batch.names, batch.upper_slots, batch.lower_slots, transfer.result, batch.ties, strict=True)
            new = []
            for name, upper, lower, block_digest, ties in landed:
                if device.pools[batch.group_id].name(upper) != name:
                    continue  # evicted on purpose meanwhile
                if self._residency.came_to_host(batch.group_id, lower, name, block_digest, ties):
                    new.append(lower)
                device.dirty[batch.group_id].pop(upper, None)
            self._residency.used_in_host(batch.group_id, new)
        self._end(Route.DEVICE_TO_HOST, batch, transfer.error)
        for tenant in {ties.tenant for ties in batch.ties}:
            self._residency.keep_quota(batch.group_id, tenant)

    def _landed_on_disk(self, batch: Batch, transfer: Transfer) -> None:
        host, disk = self._residency.host, self._residency.disk
        assert host is not None, "a batch left a host tier that is not there"
        assert disk is not None, "a batch landed on a disk that is not there"
        if transfer.error is None:
            disk.landed(transfer.result)
            self.num_stored += len(batch.names)
            for name, slot in zip(batch.names, batch.upper_slots, strict=True):
                if host.pools[batch.group_id].name(slot) == name:
                    host.dirty[batch.group_id].pop(slot, None)
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
        elif error is not None and not isinstance(error, LaneClosed):
            self._not_before = self._clock() + BACK_OFF_S
        self._upper(route).pools[batch.group_id].put_back(batch.upper_slots)
        if batch.lower_slots and self._residency.host is not None:
            self._residency.host.pools[batch.group_id].release(batch.lower_slots)

    def _upper(self, route: Route) -> SlotTier:
        upper = self._residency.device if route is Route.DEVICE_TO_HOST else self._residency.host
        assert upper is not None, f"{route} without its upper tier"
        return upper
