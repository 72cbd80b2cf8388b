"""Spiller: keeps the eviction end of device and host copied down, ahead of need and never in anyone's way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtier.store.blob_store import Blob
from kvtier.store.record import digest
from kvtier.tiers.block_hash import BlockName
from kvtier.tiers.clean_ahead import CleanAhead
from kvtier.tiers.residency import Residency, SlotTier
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.lane import Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

BATCH_BYTES = 8 << 20
MAX_IN_FLIGHT = 2  # batches a route, so that the next one is copied while the last one is being recorded
BACK_OFF_S = 1.0  # after a failed batch; the tiers above keep serving


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks on their way down. Their upper slots are leased, and their lower ones if the host is the target."""

    group_id: int
    names: tuple[BlockName, ...]
    upper_slots: tuple[int, ...]
    lower_slots: tuple[int, ...]
    submitted_at: float


class Spiller:
    """Copies cold blocks down while lanes are idle. Owned by the cache's thread.

    Only blocks among the oldest `CleanAhead.num_blocks` are copied: what is asked for again before that costs nothing.
    """

    def __init__(
        self,
        residency: Residency,
        memories: Sequence[BlockMemory],
        transfers: TransferEngine,
        window: CleanAhead,
        clock: Callable[[], float],
    ) -> None:
        self._residency = residency
        self._memories = memories
        self._transfers = transfers
        self._window = window
        self._clock = clock
        self.num_stored = 0  # blocks that have landed on disk
        self._in_flight: dict[Route, list[Batch]] = {Route.DEVICE_TO_HOST: [], Route.HOST_TO_DISK: []}
        self._not_before = dict.fromkeys(self._in_flight, 0.0)

    def spill(self, demand: Mapping[Route, Sequence[int]]) -> int:
        """Start copies for dirty blocks among the oldest of each tier; the number of blocks under way.

        The window covers `CleanAhead.num_blocks`, and the *demand* of promotions about to take slots: for each route,
        how many slots of its upper tier, by group.
        """
        for route in (Route.HOST_TO_DISK, Route.DEVICE_TO_HOST):
            if self._has_lower(route):
                for group_id in range(len(self._memories)):
                    self._start(route, group_id, self._window.num_blocks + demand[route][group_id])
        return sum(len(batch.names) for batches in self._in_flight.values() for batch in batches)

    def num_under_way(self, route: Route) -> int:
        """Batches on this route that have not landed."""
        return len(self._in_flight[route])

    def num_dirty(self) -> int:
        """Cached blocks of device and host without a copy on disk or on their way there; 0 without a disk."""
        residency = self._residency
        if residency.disk is None:
            return 0
        tiers = [tier for tier in (residency.device, residency.host) if tier is not None]
        return sum(
            len(self._dirty(tier, group_id, tier.pools[group_id].num_slots))
            for tier in tiers
            for group_id in range(len(self._memories))
        )

    def num_leases(self, tier: SlotTier, group_id: int) -> int:
        """Leases that batches under way hold on a pool."""
        upper = Route.DEVICE_TO_HOST if tier is self._residency.device else Route.HOST_TO_DISK
        leases = sum(len(batch.names) for batch in self._in_flight[upper] if batch.group_id == group_id)
        if tier is self._residency.host:
            below = self._in_flight[Route.DEVICE_TO_HOST]
            leases += sum(len(batch.names) for batch in below if batch.group_id == group_id)
        return leases

    def _start(self, route: Route, group_id: int, window: int) -> None:
        busy = sum(batch.group_id == group_id for batch in self._in_flight[route])
        if busy >= MAX_IN_FLIGHT or self._clock() < self._not_before[route]:
            return
        tier = self._upper(route)
        pool = tier.pools[group_id]
        # A spill leases its source. Never more than a quarter of the free slots: allocations find the rest.
        most = min(max(1, BATCH_BYTES // self._memories[group_id].block_bytes), max(1, pool.num_free // 4))
        dirty = self._dirty(tier, group_id, window)[:most]
        if not dirty:
            return
        lower_slots = self._lower_slots(route, group_id, len(dirty))
        if lower_slots is not None:
            dirty = dirty[: len(lower_slots)]
        if not dirty:
            return
        names = tuple(name for slot in dirty if (name := pool.name(slot)) is not None)
        batch = Batch(group_id, names, tuple(dirty), tuple(lower_slots or ()), self._clock())
        pool.lend(dirty)
        self._in_flight[route].append(batch)
        work, deliver = self._work(route, batch)
        num_bytes = len(dirty) * self._memories[group_id].block_bytes
        if not self._transfers.submit(route, work, num_bytes, deliver):
            self._end(route, batch)

    def _dirty(self, tier: SlotTier, group_id: int, window: int) -> list[int]:
        """The cached slots among the *window* oldest that have no copy below; clean marks are filled in on the way."""
        residency, pool, clean = self._residency, tier.pools[group_id], tier.clean[group_id]
        dirty = []
        for slot in pool.victims(window):
            name = pool.name(slot)
            if slot in clean or name is None:
                continue
            if tier is residency.device:
                below = residency.has_copy_below_device(group_id, name)
            else:
                below = residency.disk is not None and residency.disk.holds(group_id, name)
            if below:
                clean.add(slot)
            else:
                dirty.append(slot)
        return dirty

    def _lower_slots(self, route: Route, group_id: int, num_slots: int) -> list[int] | None:
        residency, window = self._residency, self._window.num_blocks
        if route is Route.HOST_TO_DISK or residency.host is None:
            return None
        if residency.disk is not None:
            return residency.take_clean(residency.host, group_id, num_slots, window)
        free = residency.host.pools[group_id].num_free
        return residency.take(residency.host, group_id, min(num_slots, free), window) or []

    def _work(self, route: Route, batch: Batch) -> tuple[Callable[[], object], Callable[[Transfer], None]]:
        """What the lane does, with nothing but memory and values, and what the owner does with its outcome."""
        memory = self._memories[batch.group_id]
        if route is Route.DEVICE_TO_HOST:

            def copy_down() -> list[bytes]:
                memory.to_host(batch.upper_slots, batch.lower_slots)
                return [digest(memory.host_block(slot)) for slot in batch.lower_slots]

            return copy_down, lambda transfer: self._landed_in_host(batch, transfer)

        disk = self._residency.disk
        assert disk is not None, "a route to disk without a disk"
        digests = self._residency.digests[batch.group_id]
        blobs = [
            Blob(disk.key(batch.group_id, name), digests[slot], memory.host_block(slot))
            for name, slot in zip(batch.names, batch.upper_slots, strict=True)
        ]
        return lambda: disk.write(blobs), lambda transfer: self._landed_on_disk(batch, transfer)

    def _landed_in_host(self, batch: Batch, transfer: Transfer) -> None:
        host, device = self._residency.host, self._residency.device
        assert host is not None, "a batch landed in a host tier that is not there"
        if transfer.error is None:
            self._window.spilled(self._clock() - batch.submitted_at)
            landed = zip(batch.names, batch.upper_slots, batch.lower_slots, transfer.result, strict=True)
            for name, upper, lower, block_digest in landed:
                if host.pools[batch.group_id].commit(lower, name):
                    self._residency.digests[batch.group_id][lower] = block_digest
                if device.pools[batch.group_id].name(upper) == name:
                    device.clean[batch.group_id].add(upper)
        self._end(Route.DEVICE_TO_HOST, batch, failed=transfer.error is not None)

    def _landed_on_disk(self, batch: Batch, transfer: Transfer) -> None:
        host = self._residency.host
        assert host is not None, "a batch left a host tier that is not there"
        if transfer.error is None:
            self.num_stored += len(batch.names)
            for name, slot in zip(batch.names, batch.upper_slots, strict=True):
                if host.pools[batch.group_id].name(slot) == name:
                    host.clean[batch.group_id].add(slot)
            self._residency.evicted_from_disk(transfer.result)
        self._end(Route.HOST_TO_DISK, batch, failed=transfer.error is not None)

    def _end(self, route: Route, batch: Batch, failed: bool = False) -> None:
        self._in_flight[route].remove(batch)
        if failed:
            self._not_before[route] = self._clock() + BACK_OFF_S
        self._upper(route).pools[batch.group_id].put_back(batch.upper_slots)
        if batch.lower_slots and self._residency.host is not None:
            self._residency.host.pools[batch.group_id].release(batch.lower_slots)

    def _has_lower(self, route: Route) -> bool:
        return (self._residency.host if route is Route.DEVICE_TO_HOST else self._residency.disk) is not None

    def _upper(self, route: Route) -> SlotTier:
        upper = self._residency.device if route is Route.DEVICE_TO_HOST else self._residency.host
        assert upper is not None, f"{route} without its upper tier"
        return upper
