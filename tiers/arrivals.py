"""Arrivals: blocks on their way up, disk -> host -> device, each verified on the way."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvtier.store.record import Fault, digest_among
from kvtier.tiers.block_hash import BlockChain, BlockName
from kvtier.tiers.breaker import Attempt, BreakerState
from kvtier.tiers.disk_tier import DiskTier
from kvtier.tiers.groups import AttentionGroup
from kvtier.tiers.layered_upload import LayeredUpload
from kvtier.tiers.promotion import Arrival
from kvtier.tiers.residency import Residency, SlotTier
from kvtier.tiers.tenants import NOBODY, Ties, tenant_of
from kvtier.tiers.tier import Reason, Tier
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.layer_gate import LayerGate
from kvtier.transfer.transfer_engine import Route, TransferEngine

REASONS = {  # any other fault: corrupt
    Fault.MISSING: Reason.EVICTED_FROM_DISK,
    Fault.IO_ERROR: Reason.FAILED,
    Fault.KEY: Reason.FAILED,
}
MOST_PARTS = 8  # that blocks come in layer by layer: an eighth of the copy is all that computing has to wait for
BY_LAYERS_BYTES = 4 << 20  # less is there before computing could begin
BATCH_BYTES = 4 << 20  # for each copier: small enough that reading, verifying and uploading overlap


def read_blocks(
    disk: DiskTier, memory: BlockMemory, keys: Sequence[bytes], host_slots: Sequence[int]
) -> list[bytes | Fault]:
    """A reader's work: fill the host slots from disk, verified; each block's digest or fault."""
    return disk.read(keys, [memory.host_block(slot) for slot in host_slots])


def verify_blocks(memory: BlockMemory, host_slots: Sequence[int], digests: Sequence[bytes]) -> list[bool]:
    """Which host blocks still are what arrived there."""
    digest = digest_among(memory.num_copiers)
    return [digest(memory.host_block(slot)) == known for slot, known in zip(host_slots, digests, strict=True)]


def upload_blocks(
    memory: BlockMemory, host_slots: Sequence[int], digests: Sequence[bytes], device_slots: Sequence[int]
) -> list[bool]:
    """An uploader's work: copy to the device those host blocks that still are what arrived there."""
    good = verify_blocks(memory, host_slots, digests)
    memory.to_device(
        [slot for slot, is_good in zip(host_slots, good, strict=True) if is_good],
        [slot for slot, is_good in zip(device_slots, good, strict=True) if is_good],
    )
    return good


class Arrivals:
    """A block is under way once, however many promotions want it. A batch that finds its lane full waits here, in
    order. *resolved* is told of each block that has arrived (None) or never will (the reason). Owned by the cache's
    thread.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        residency: Residency,
        memories: Sequence[BlockMemory],
        transfers: TransferEngine,
        resolved: Callable[[Arrival, Reason | None], None],
    ) -> None:
        self._groups = groups
        self._residency = residency
        self._memories = memories
        self._transfers = transfers
        self._resolved = resolved
        self._arrivals: list[dict[BlockName, Arrival]] = [{} for _ in groups]
        self._to_read: deque[Arrival] = deque()
        self._to_upload: deque[Arrival] = deque()
        self._to_verify: deque[tuple[LayeredUpload, list[Arrival]]] = deque()
        self._still_reading: set[Arrival] = set()  # for nobody any more; each leases its host slot
        self._reads: list[Attempt] = []  # under way

    def __iter__(self) -> Iterator[Arrival]:
        return (arrival for arrivals in self._arrivals for arrival in arrivals.values())

    def find(self, group_id: int, name: BlockName) -> Arrival | None:
        """The block, if it is under way."""
        return self._arrivals[group_id].get(name)

    def start(self, chain: BlockChain, group_id: int, block_id: int, device_slot: int) -> Arrival:
        """Put one block under way into *device_slot*, whose lease becomes the transfer's; its host copy is leased."""
        (name,) = chain.names_of(self._groups[group_id].block_size, range(block_id, block_id + 1))
        host = self._residency.host
        host_slot = host.pools[group_id].find(name) if host is not None else None
        if host is None or host_slot is None:
            arrival = Arrival(group_id, name, device_slot, Tier.DISK, ties=self._ties(chain, group_id, block_id))
            self._to_read.append(arrival)
        else:
            host.pools[group_id].lease([host_slot])
            known = self._residency.digests[group_id][host_slot]
            arrival = Arrival(group_id, name, device_slot, Tier.HOST, host_slot, digest=known)
            self._to_upload.append(arrival)
        self._arrivals[group_id][name] = arrival
        return arrival

    def by_layers(self, arrivals: Sequence[Arrival]) -> LayerGate | None:
        """Have these, just started and all in host memory, come layer by layer, so that computing can begin before
        they are all there; None if they come as usual.

        They are verified beside the copies: see `LayerGate` for what that means.
        """
        num_parts = min(MOST_PARTS, max(self._memories[arrival.group_id].num_layers for arrival in arrivals))
        num_bytes = sum(self._memories[arrival.group_id].block_bytes for arrival in arrivals)
        if num_bytes < BY_LAYERS_BYTES or any(a.source is not Tier.HOST for a in arrivals):
            return None
        upload = LayeredUpload(arrivals, self._memories, num_parts)
        wanted = set(arrivals)
        kept = deque(arrival for arrival in self._to_upload if arrival not in wanted)
        if kept or not self._transfers.submit(
            Route.HOST_TO_DEVICE, upload.copy, num_bytes, lambda transfer: self._copied_layers(upload, transfer)
        ):
            return None
        self._to_upload = kept
        self._to_verify.extend((upload, batch) for batch in self._batches(arrivals))
        return upload.gate

    def pump(self, window: int) -> None:
        """Hand queued blocks to lanes that have room."""
        while self._to_verify and self._submit_verification():
            pass
        while self._to_read and self._submit_read(window):
            pass
        while self._to_upload and self._submit_upload():
            pass

    @property
    def queued_to_read(self) -> int:
        """Bytes of blocks that wait for the lane from disk."""
        return sum(self._memories[arrival.group_id].block_bytes for arrival in self._to_read)

    @property
    def queued_to_upload(self) -> int:
        """Bytes of blocks that wait for the lane to the device."""
        return sum(self._memories[arrival.group_id].block_bytes for arrival in self._to_upload)

    def hung(self) -> None:
        """A deadline has passed: the reads under way count as hung, or every request to come would wait as long."""
        for attempt in self._reads:
            assert self._residency.disk is not None, "a read without a disk"
            self._residency.disk.reading.hung(attempt)

    def drop(self, unwanted: set[Arrival]) -> None:
        """Nobody waits for these blocks any more. Queued ones are not started; those being read free their device slot
        now, since the read, however slow, needs only the host slot."""
        queued = unwanted.intersection([*self._to_read, *self._to_upload])
        if queued:
            self._to_read = deque(arrival for arrival in self._to_read if arrival not in queued)
            self._to_upload = deque(arrival for arrival in self._to_upload if arrival not in queued)
        for arrival in queued:
            self._resolve(arrival, None)
        for arrival in unwanted - queued:
            if arrival.is_reading:
                del self._arrivals[arrival.group_id][arrival.name]
                self._residency.device.pools[arrival.group_id].release([arrival.device_slot])
                self._still_reading.add(arrival)

    def num_leases(self, tier: SlotTier, group_id: int) -> int:
        """Leases that blocks under way hold on a pool, beside those of the promotions that wait for them."""
        arrivals = self._arrivals[group_id].values()
        if tier is self._residency.device:
            return len(arrivals)
        late = sum(arrival.group_id == group_id for arrival in self._still_reading)
        return late + sum(arrival.host_slot is not None for arrival in arrivals)

    def check(self) -> None:
        """Raise AssertionError if a block under way can be found already."""
        for arrival in self:
            pool = self._residency.device.pools[arrival.group_id]
            assert pool.name(arrival.device_slot) is None, "a block can be found before its bytes are there"
            assert not pool.is_free(arrival.device_slot), "a block arrives in a slot that is free"

    def _ties(self, chain: BlockChain, group_id: int, block_id: int) -> Ties:
        """A block's ties. No parent where a group forgets: it needs no more than its window."""
        group, tenant = self._groups[group_id], tenant_of(chain.extra.cache_salt)
        if group.forgets or block_id == 0:
            return Ties(None, tenant)
        return Ties(chain.names_of(group.block_size, range(block_id - 1, block_id))[0], tenant)

    def _batches(self, arrivals: Sequence[Arrival]) -> Iterator[list[Arrival]]:
        queue = deque(sorted(arrivals, key=lambda arrival: arrival.group_id))
        while queue:
            yield self._batch(queue)

    def _batch(self, queue: deque[Arrival]) -> list[Arrival]:
        """The first blocks in the queue that are of one group, up to a batch."""
        group_id = queue[0].group_id
        memory = self._memories[group_id]
        most = max(1, memory.num_copiers * BATCH_BYTES // memory.block_bytes)
        batch: list[Arrival] = []
        while queue and queue[0].group_id == group_id and len(batch) < most:
            batch.append(queue.popleft())
        return batch

    def _submit_read(self, window: int) -> bool:
        residency = self._residency
        assert residency.host is not None, "blocks come from disk through the host tier"
        assert residency.disk is not None, "a block to read without a disk"
        attempt = residency.disk.reading.begin()
        if attempt is None:
            self._give_up_reading()
            return False
        group_id = self._to_read[0].group_id
        pool = residency.host.pools[group_id]
        batch = self._batch(self._to_read)
        slots = residency.take_clean(residency.host, group_id, len(batch), window)
        if not slots and not self._transfers.num_pending(Route.HOST_TO_DISK):  # no spill will make room
            slots = residency.take(residency.host, group_id, min(len(batch), pool.num_free), window) or []
        self._to_read.extendleft(reversed(batch[len(slots) :]))
        batch = batch[: len(slots)]
        if not batch:
            residency.disk.reading.withdrawn(attempt)
            return False
        for arrival, slot in zip(batch, slots, strict=True):
            arrival.host_slot = slot
        keys = [residency.disk.key(group_id, arrival.name) for arrival in batch]
        memory, disk = self._memories[group_id], residency.disk
        submitted = self._transfers.submit(
            Route.DISK_TO_HOST,
            lambda: read_blocks(disk, memory, keys, slots),
            len(batch) * memory.block_bytes,
            lambda transfer: self._landed_in_host(batch, transfer, attempt),
        )
        for arrival in batch:
            arrival.is_reading = submitted
        if submitted:
            self._reads.append(attempt)
        else:
            residency.disk.reading.withdrawn(attempt)
            for arrival in batch:
                arrival.host_slot = None
            pool.release(slots)
            self._to_read.extendleft(reversed(batch))
        return submitted

    def _give_up_reading(self) -> None:
        """The disk is to be left alone. What is queued fails, unless a probe is under way and may succeed."""
        disk = self._residency.disk
        if disk is not None and disk.reading.state is BreakerState.OPEN:
            queued, self._to_read = list(self._to_read), deque()
            for arrival in queued:
                self._resolve(arrival, Reason.FAILED)

    def _submit_upload(self) -> bool:
        batch = self._batch(self._to_upload)
        memory = self._memories[batch[0].group_id]
        host_slots = [arrival.host_slot for arrival in batch if arrival.host_slot is not None]
        digests = [arrival.digest for arrival in batch]
        device_slots = [arrival.device_slot for arrival in batch]
        submitted = self._transfers.submit(
            Route.HOST_TO_DEVICE,
            lambda: upload_blocks(memory, host_slots, digests, device_slots),
            len(batch) * memory.block_bytes,
            lambda transfer: self._uploaded(batch, transfer),
        )
        if not submitted:
            self._to_upload.extendleft(reversed(batch))
        return submitted

    def _submit_verification(self) -> bool:
        upload, batch = self._to_verify[0]
        memory = self._memories[batch[0].group_id]
        host_slots = [arrival.host_slot for arrival in batch if arrival.host_slot is not None]
        digests = [arrival.digest for arrival in batch]
        submitted = self._transfers.submit(
            Route.HOST_TO_DEVICE,
            lambda: verify_blocks(memory, host_slots, digests),
            0,
            lambda transfer: self._verified(upload, batch, transfer),
        )
        if submitted:
            self._to_verify.popleft()
        return submitted

    def _copied_layers(self, upload: LayeredUpload, transfer: Transfer) -> None:
        upload.copied(transfer.error is None)
        self._take_in(upload)

    def _verified(self, upload: LayeredUpload, batch: Sequence[Arrival], transfer: Transfer) -> None:
        upload.verified(batch, transfer.result if transfer.error is None else [None] * len(batch))
        self._take_in(upload)

    def _take_in(self, upload: LayeredUpload) -> None:
        if (outcomes := upload.outcomes()) is not None:
            for batch in self._batches(list(outcomes)):
                self._landed_on_device(batch, [outcomes[arrival] for arrival in batch])

    def _landed_in_host(self, batch: Sequence[Arrival], transfer: Transfer, attempt: Attempt) -> None:
        host, disk = self._residency.host, self._residency.disk
        assert host is not None, "a block was read without a host tier"
        assert disk is not None, "a block was read without a disk"
        outcomes = transfer.result if transfer.error is None else [Fault.IO_ERROR] * len(batch)
        self._reads.remove(attempt)
        if isinstance(transfer.error, LaneClosed):
            disk.reading.withdrawn(attempt)
        elif Fault.IO_ERROR in outcomes:
            disk.reading.failed(attempt)
        else:
            disk.reading.succeeded(attempt)
        for arrival, outcome in zip(batch, outcomes, strict=True):
            assert arrival.host_slot is not None, "a block was read into no slot"
            arrival.is_reading = False
            failure = None
            if isinstance(outcome, Fault):
                failure = REASONS.get(outcome, Reason.CORRUPT)
                disk.faults[outcome.value] += outcome is not Fault.MISSING
                if outcome is not Fault.IO_ERROR:
                    self._residency.not_on_disk(arrival.group_id, arrival.name)
                self._residency.lost(arrival.group_id, arrival.name)
            else:
                arrival.digest = outcome
                self._residency.came_to_host(arrival.group_id, arrival.host_slot, arrival.name, outcome, arrival.ties)
            if arrival in self._still_reading:
                self._still_reading.discard(arrival)
                host.pools[arrival.group_id].release([arrival.host_slot])
            elif failure is None:
                self._to_upload.append(arrival)
            else:
                self._resolve(arrival, failure)

    def _uploaded(self, batch: Sequence[Arrival], transfer: Transfer) -> None:
        self._landed_on_device(batch, transfer.result if transfer.error is None else [None] * len(batch))

    def _landed_on_device(self, batch: Sequence[Arrival], outcomes: Sequence[bool | None]) -> None:
        """*outcomes*: whether a block's bytes are right; None if its copy failed."""
        host = self._residency.host
        assert host is not None, "a block was uploaded without a host tier"
        for arrival, is_good in zip(batch, outcomes, strict=True):
            if is_good:
                if (
                    host.pools[arrival.group_id].find(arrival.name) == arrival.host_slot
                ):  # else it was evicted on purpose
                    self._publish(arrival)
                self._resolve(arrival, None)
            elif is_good is None:
                self._resolve(arrival, Reason.FAILED)
            else:
                host.corrupt[Fault.CORRUPT.value] += 1
                assert arrival.host_slot is not None, "a block was uploaded from no slot"
                self._residency.evict(host, arrival.group_id, [arrival.host_slot])
                self._resolve(arrival, Reason.CORRUPT)
        for tenant in {arrival.ties.tenant for arrival in batch}:  # what came from disk has made host memory fuller
            self._residency.keep_quota(batch[0].group_id, tenant)

    def _publish(self, arrival: Arrival) -> None:
        """The block is on the device: name it, or let those who waited use the one that was computed meanwhile."""
        promotion, block_id = arrival.waiters[0] if arrival.waiters else (None, 0)
        chain = None if promotion is None else promotion.chain
        tenant = (
            self._residency.ties[arrival.group_id][arrival.host_slot].tenant
            if arrival.host_slot is not None
            else NOBODY
        )
        slot = self._residency.came_up(arrival.group_id, arrival.device_slot, arrival.name, tenant, chain, block_id)
        if slot != arrival.device_slot:
            pool = self._residency.device.pools[arrival.group_id]
            for waiter, place in arrival.waiters:
                pool.lease([slot])
                pool.release([arrival.device_slot])
                waiter.tables[arrival.group_id][place] = slot

    def _resolve(self, arrival: Arrival, failure: Reason | None) -> None:
        """The block has arrived, or never will: the transfer's leases end, and who waited learns of it."""
        del self._arrivals[arrival.group_id][arrival.name]
        if arrival.host_slot is not None and self._residency.host is not None:
            self._residency.host.pools[arrival.group_id].release([arrival.host_slot])
        self._residency.device.pools[arrival.group_id].release([arrival.device_slot])
        self._resolved(arrival, failure)
