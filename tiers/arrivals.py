"""Arrivals: blocks on their way up to the device, through host memory, verified before they are copied."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from kvtier.store.record import Fault, digest_among
from kvtier.tiers.block_hash import BlockChain, BlockName
from kvtier.tiers.groups import AttentionGroup
from kvtier.tiers.landings import Landing, Landings, blocks_in_batch
from kvtier.tiers.layered_upload import LayeredUpload
from kvtier.tiers.promotion import Arrival
from kvtier.tiers.residency import Residency, SlotTier
from kvtier.tiers.tier import Reason, Tier
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.lane import Transfer
from kvtier.transfer.layer_gate import LayerGate
from kvtier.transfer.transfer_engine import Route, TransferEngine

MOST_PARTS = 8  # that blocks come in layer by layer: an eighth of the copy is all that computing has to wait for
BY_LAYERS_BYTES = 4 << 20  # less is there before computing could begin
LATE_S = 1.0  # a copy to the device that made a deadline pass is on its lane for so long


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
    order. *resolved* is told of each block that has arrived (None) or never will (the reason).

    What is on a lane that hangs is under way for nobody any more, but leases both of its slots until it comes back.
    Owned by the cache's thread.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        residency: Residency,
        memories: Sequence[BlockMemory],
        transfers: TransferEngine,
        landings: Landings,
        resolved: Callable[[Arrival, Reason | None], None],
        clock: Callable[[], float],
    ) -> None:
        self._groups = groups
        self._residency = residency
        self._memories = memories
        self._transfers = transfers
        self._landings = landings
        self._resolved = resolved
        self._clock = clock
        self._arrivals: list[dict[BlockName, Arrival]] = [{} for _ in groups]
        self._to_upload: deque[Arrival] = deque()
        self._to_verify: deque[tuple[LayeredUpload, list[Arrival]]] = deque()
        self._on_lane: dict[Arrival, float] = {}  # and since when
        self._hanging: set[Arrival] = set()

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
            arrival = Arrival(group_id, name, device_slot, Tier.DISK)
            waiter = partial(self._landed_in_host, arrival)
            arrival.landing = self._landings.join(chain, group_id, block_id, arrival, waiter)
        else:
            host.pools[group_id].lease([host_slot])
            known = self._residency.host_blocks[group_id].digest(host_slot)
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
        self._on_lane.update(dict.fromkeys(arrivals, self._clock()))
        self._to_verify.extend((upload, batch) for batch in self._batches(arrivals))
        return upload.gate

    def pump(self) -> None:
        """Hand queued blocks to lanes that have room."""
        while self._to_verify and self._submit_verification():
            pass
        while self._to_upload and self._submit_upload():
            pass

    @property
    def queued_to_upload(self) -> int:
        """Bytes of blocks that wait for the lane to the device."""
        return sum(self._memories[arrival.group_id].block_bytes for arrival in self._to_upload)

    def drop(self, unwanted: set[Arrival]) -> None:
        """Nobody waits for these blocks any more. What is not being copied up gives its device slot back now: a read,
        however slow, needs only the host slot."""
        queued = unwanted.intersection(self._to_upload)
        if queued:
            self._to_upload = deque(arrival for arrival in self._to_upload if arrival not in queued)
        for arrival in unwanted:
            if arrival.landing is not None:
                self._landings.leave(arrival.landing, arrival)
            if arrival.landing is not None or arrival in queued:
                self._resolve(arrival, None)

    def hang(self, arrivals: Iterable[Arrival]) -> bool:
        """Whether the lane to the device holds one of these up."""
        since = self._clock() - LATE_S
        return any(self._on_lane.get(arrival, since + 1) <= since for arrival in arrivals)

    def hung(self) -> None:
        """The lane to the device hangs, and nobody waits for what is on it. Until it has moved, nothing is looked for
        below the device: every request to come would wait as long."""
        for arrival in self._on_lane.keys() - self._hanging:
            assert not arrival.waiters, "a block that hangs is waited for"
            del self._arrivals[arrival.group_id][arrival.name]
            self._hanging.add(arrival)
        self._residency.is_cut_off = True
        # Other threads of the lane may be well; if it is full, something on it comes back or nothing ever will.
        self._transfers.submit(Route.HOST_TO_DEVICE, lambda: None, 0, lambda transfer: self._moved())

    def num_leases(self, tier: SlotTier, group_id: int) -> int:
        """Leases that blocks under way hold on a pool, beside those of the promotions that wait for them."""
        hanging = (arrival for arrival in self._hanging if arrival.group_id == group_id)
        arrivals = [*self._arrivals[group_id].values(), *hanging]
        if tier is self._residency.device:
            return len(arrivals)
        return sum(arrival.host_slot is not None for arrival in arrivals)

    def check(self) -> None:
        """Raise AssertionError if a block under way can be found already."""
        for arrival in self:
            pool = self._residency.device.pools[arrival.group_id]
            assert pool.name(arrival.device_slot) is None, "a block can be found before its bytes are there"
            assert not pool.is_free(arrival.device_slot), "a block arrives in a slot that is free"

    def _batches(self, arrivals: Sequence[Arrival]) -> Iterator[list[Arrival]]:
        queue = deque(sorted(arrivals, key=lambda arrival: arrival.group_id))
        while queue:
            yield self._batch(queue)

    def _batch(self, queue: deque[Arrival]) -> list[Arrival]:
        """The first blocks in the queue that are of one group, up to a batch."""
        group_id = queue[0].group_id
        most = blocks_in_batch(self._memories[group_id])
        batch: list[Arrival] = []
        while queue and queue[0].group_id == group_id and len(batch) < most:
            batch.append(queue.popleft())
        return batch

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
        if submitted:
            self._on_lane.update(dict.fromkeys(batch, self._clock()))
        else:
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

    def _moved(self) -> None:
        """Something came back from the lane to the device: it does not hang, or not all of it."""
        self._residency.is_cut_off = False

    def _copied_layers(self, upload: LayeredUpload, transfer: Transfer) -> None:
        self._moved()
        upload.copied(transfer.error is None)
        self._take_in(upload)

    def _verified(self, upload: LayeredUpload, batch: Sequence[Arrival], transfer: Transfer) -> None:
        self._moved()
        upload.verified(batch, transfer.result if transfer.error is None else [None] * len(batch))
        self._take_in(upload)

    def _take_in(self, upload: LayeredUpload) -> None:
        if (outcomes := upload.outcomes()) is not None:
            for batch in self._batches(list(outcomes)):
                self._landed_on_device(batch, [outcomes[arrival] for arrival in batch])

    def _landed_in_host(self, arrival: Arrival, landing: Landing, failure: Reason | None) -> None:
        arrival.landing = None
        if failure is not None or landing.host_slot is None or self._residency.host is None:
            self._resolve(arrival, failure or Reason.FAILED)
            return
        self._residency.host.pools[arrival.group_id].lease([landing.host_slot])
        arrival.host_slot, arrival.digest = landing.host_slot, landing.digest
        arrival.tenant = landing.ties.tenant
        self._to_upload.append(arrival)

    def _uploaded(self, batch: Sequence[Arrival], transfer: Transfer) -> None:
        self._moved()
        self._landed_on_device(batch, transfer.result if transfer.error is None else [None] * len(batch))

    def _landed_on_device(self, batch: Sequence[Arrival], outcomes: Sequence[bool | None]) -> None:
        """*outcomes*: whether a block's bytes are right; None if its copy failed."""
        host = self._residency.host
        assert host is not None, "a block was uploaded without a host tier"
        for arrival, is_good in zip(batch, outcomes, strict=True):
            if is_good:
                in_host = host.pools[arrival.group_id].find(arrival.name)
                if in_host is not None:  # else it was evicted on purpose
                    self._publish(arrival, self._residency.host_blocks[arrival.group_id].tenant(in_host))
                self._resolve(arrival, None)
            elif is_good is None:
                self._resolve(arrival, Reason.FAILED)
            else:
                host.corrupt[Fault.CORRUPT.value] += 1
                assert arrival.host_slot is not None, "a block was uploaded from no slot"
                self._residency.evict(host, arrival.group_id, [arrival.host_slot])
                self._resolve(arrival, Reason.CORRUPT)
        for tenant in {arrival.tenant for arrival in batch}:  # what came from disk has made host memory fuller
            self._residency.keep_quota(batch[0].group_id, tenant)

    def _publish(self, arrival: Arrival, tenant: bytes) -> None:
        """The block is on the device: name it, or let those who waited use the one that was computed meanwhile."""
        promotion, block_id = arrival.waiters[0] if arrival.waiters else (None, 0)
        chain = None if promotion is None else promotion.chain
        slot = self._residency.came_up(arrival.group_id, arrival.device_slot, arrival.name, tenant, chain, block_id)
        if slot != arrival.device_slot:
            pool = self._residency.device.pools[arrival.group_id]
            for waiter, place in arrival.waiters:
                pool.lease([slot])
                pool.release([arrival.device_slot])
                waiter.tables[arrival.group_id][place] = slot

    def _resolve(self, arrival: Arrival, failure: Reason | None) -> None:
        """The block has arrived, or never will: the transfer's leases end, and who waited learns of it."""
        if arrival in self._hanging:
            self._hanging.remove(arrival)
        else:
            del self._arrivals[arrival.group_id][arrival.name]
        self._on_lane.pop(arrival, None)
        if arrival.host_slot is not None and self._residency.host is not None:
            self._residency.host.pools[arrival.group_id].release([arrival.host_slot])
        self._residency.device.pools[arrival.group_id].release([arrival.device_slot])
        self._resolved(arrival, failure)
