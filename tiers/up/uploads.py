"""Uploads: the blocks on their way to the device through host memory, where their bytes are verified."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile

import numpy as np
import numpy.typing as npt

from kvtier.store.record import digest_for_threads
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.copies import blocks_in_batch
from kvtier.tiers.lower.lower_tiers import Fetch
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Reason
from kvtier.tiers.residency import GroupTiers, Residency
from kvtier.tiers.up.backlog import Source
from kvtier.tiers.up.promotion import Upload
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.lane import Transfer
from kvtier.transfer.layer_gate import LayerGate
from kvtier.transfer.transfer_engine import Route, TransferEngine

BATCH_BYTES = 4 << 20  # bytes per batch and copier: small enough that reading, verifying and uploading overlap
BATCH_BLOCKS = 32  # maximum number of blocks per batch, so that processing a finished batch is short
MAX_PARTS = 8  # parts of a copy by layers; compute waits only for the first part, an eighth of the copy
BY_LAYERS_BYTES = 4 << 20  # minimum size of a copy by layers; smaller copies end before compute could begin
LATE_S = 1.0  # a copy counts as hung if it has been on its lane for this long and a promotion's deadline has passed


class LayeredUpload:
    """A copy of several blocks to the device, layer by layer, so that compute can begin before the copy ends.

    The copy is done when all blocks are copied and verified. A thread of the lane (the queue of copies to the device)
    runs `copy`. The owner's thread calls all other methods.
    """

    def __init__(self, uploads: Sequence[Upload], num_parts: int) -> None:
        self.gate = LayerGate(num_parts)
        self._outcomes: dict[Upload, bool | None] = {}
        self._num_uploads = len(uploads)
        self._is_copied: bool | None = None
        self._copies: dict[BlockMemory, tuple[list[int], list[int]]] = {}  # host and device slots
        for upload in uploads:
            assert upload.host_slot is not None, "a block is not in host memory"
            host_slots, device_slots = self._copies.setdefault(upload.group.memory, ([], []))
            host_slots.append(upload.host_slot)
            device_slots.append(upload.device_slot)

    def copy(self) -> None:
        """Copy the blocks a few layers at a time. After each time, the `LayerGate` lets computing use these layers."""
        try:
            for part in range(self.gate.num_parts):
                for memory, (host_slots, device_slots) in self._copies.items():
                    layers = self.gate.layers(part, memory.num_layers)
                    if layers:
                        memory.to_device_layers(host_slots, device_slots, layers)
                self.gate.open_next()
        finally:
            self.gate.open_all()

    def on_copied(self, is_copied: bool) -> None:
        """Record that the copies have ended; *is_copied* is False after an error."""
        self.gate.open_all()  # needed if the lane was closed before it started `copy`
        self._is_copied = is_copied

    def on_verified(self, uploads: Sequence[Upload], outcomes: Sequence[bool | None]) -> None:
        """Record for each block whether its bytes in host memory are correct; None if an error prevented the check."""
        self._outcomes.update(zip(uploads, outcomes, strict=True))

    def outcomes(self) -> Mapping[Upload, bool | None] | None:
        """Return for each block whether its bytes are correct; None for a block whose copy or verification failed.

        Returns None instead of the mapping until the outcomes of all blocks are known.
        """
        if self._is_copied is None or len(self._outcomes) < self._num_uploads:
            return None
        if self._is_copied and not self.gate.missed:  # otherwise a step may have computed without a layer
            return self._outcomes
        return {upload: None if is_good else is_good for upload, is_good in self._outcomes.items()}


def verify_blocks(memory: BlockMemory, host_slots: Sequence[int], digests: Sequence[bytes]) -> list[bool]:
    """Return for each host block whether its bytes still match its digest."""
    digest = digest_for_threads(memory.num_copiers)
    return [digest(memory.host_block(slot)) == known for slot, known in zip(host_slots, digests, strict=True)]


def upload_blocks(
    memory: BlockMemory, host_slots: Sequence[int], digests: Sequence[bytes], device_slots: Sequence[int]
) -> list[bool]:
    """Copy those host blocks to the device whose bytes match their digests; return for each whether they match.

    Runs on a thread of a lane (a queue of copies). The bytes cannot change after the verification, because the upload
    leases the host slots until this function has returned. The host slots may belong to a sidecar, a separate process
    that owns host memory. Then the leases stay valid even if the sidecar ends this process's session.
    """
    good = verify_blocks(memory, host_slots, digests)
    memory.to_device(
        [slot for slot, is_good in zip(host_slots, good, strict=True) if is_good],
        [slot for slot, is_good in zip(device_slots, good, strict=True) if is_good],
    )
    return good


class Uploads:
    """All blocks in flight to the device. Each block is copied once, no matter how many promotions want it.

    While the lane (the queue of copies to the device) is full, blocks wait here in order. *on_resolved* is called for
    each block, with None if it has arrived, or with the reason why it failed. If the lane hangs, its blocks no longer
    count as in flight, but their slots stay leased until their transfers end. Owned by the cache's thread.
    """

    def __init__(
        self,
        residency: Residency,
        transfers: TransferEngine,
        on_resolved: Callable[[Upload, Reason | None], None],
        clock: Callable[[], float],
    ) -> None:
        self._residency = residency
        self._transfers = transfers
        self._on_resolved = on_resolved
        self._clock = clock
        self.resolved_at = 0.0  # when the last upload ended
        self._uploads: dict[GroupTiers, dict[BlockName, Upload]] = {group: {} for group in residency.groups}
        self._batch_blocks = {
            group: blocks_in_batch(group.memory.block_bytes, group.memory.num_copiers, BATCH_BLOCKS, BATCH_BYTES)
            for group in residency.groups
        }
        self._coming: dict[tuple[Fetch, int], Upload] = {}  # blocks not leased in host memory yet
        self._to_upload: OrderedDict[Upload, None] = OrderedDict()  # blocks to submit to the lane
        self.queued_bytes = 0  # bytes of `_to_upload`
        self._to_verify: deque[tuple[LayeredUpload, list[Upload]]] = deque()  # verifications to submit to the lane
        self._on_lane: dict[Upload, float] = {}  # blocks on the lane to the device, with the time of submission
        self._hanging: set[Upload] = set()  # blocks on a lane that was found to hang

    def __iter__(self) -> Iterator[Upload]:
        return (upload for uploads in self._uploads.values() for upload in uploads.values())

    def find(self, group: GroupTiers, name: BlockName) -> Upload | None:
        """Return the block's upload if it is in flight."""
        return self._uploads[group].get(name)

    def has_any(self, group: GroupTiers) -> bool:
        """Return whether any block of the group is in flight."""
        return bool(self._uploads[group])

    def are_in_flight(self, group: GroupTiers, names: Sequence[BlockName]) -> npt.NDArray[np.bool_]:
        """Return for each block whether it is in flight."""
        return np.fromiter(map(self._uploads[group].__contains__, names), np.bool_, len(names))

    def start(
        self, group: GroupTiers, names: Sequence[BlockName], device_slots: Sequence[int], sources: Sequence[Source]
    ) -> list[Upload]:
        """Start uploads from *sources* into *device_slots*. The leases on both then belong to the uploads.

        Blocks that must be read first are copied when they arrive in host memory. Blocks that are already there wait
        until the caller calls `copy_up`.
        """
        uploads, under_way = [], self._uploads[group]
        for name, device_slot, (fetch, place, tier) in zip(names, device_slots, sources, strict=True):
            host_slot = fetch.slots.item(place)
            if host_slot == ABSENT:  # the block must be read first, or its lease is not reported yet
                upload = Upload(group, name, device_slot, tier, fetch, place)
                self._coming[fetch, place] = upload
            else:
                digest = fetch.digest(place)
                upload = Upload(group, name, device_slot, tier, fetch, place, host_slot, digest)
            under_way[name] = upload
            uploads.append(upload)
        return uploads

    def on_fetched(self, fetch: Fetch, place: int, failure: Reason | None) -> None:
        """Queue a block that has arrived in host memory, or end its upload with *failure*."""
        upload = self._coming.pop((fetch, place), None)
        if upload is None:
            return  # the block is still in a backlog
        if failure is not None:
            self._resolve([upload], failure)
            return
        upload.host_slot, upload.digest = fetch.slots.item(place), fetch.digest(place)
        self.copy_up([upload])

    def copy_up(self, uploads: Iterable[Upload]) -> None:
        """Queue copies to the device for those of the blocks that are already in host memory."""
        for upload in uploads:
            if upload.host_slot is not None:
                self._to_upload[upload] = None
                self.queued_bytes += upload.group.memory.block_bytes

    def start_by_layers(self, uploads: Sequence[Upload]) -> LayerGate | None:
        """Start to copy these blocks layer by layer, so that compute can begin before all layers have arrived.

        Returns None, without any effect, if that is not possible. Compute may read a block before it is verified; see
        `LayerGate`.
        """
        num_parts = min(MAX_PARTS, max(upload.group.memory.num_layers for upload in uploads))
        num_bytes = sum(upload.group.memory.block_bytes for upload in uploads)
        if num_bytes < BY_LAYERS_BYTES or any(upload.host_slot is None for upload in uploads):
            return None
        layered = LayeredUpload(uploads, num_parts)
        if self._to_upload or not self._transfers.submit(
            Route.HOST_TO_DEVICE,
            layered.copy,
            num_bytes,
            lambda transfer: self._on_layers_copied(layered, transfer),
            len(uploads),
        ):
            return None
        self._on_lane.update(dict.fromkeys(uploads, self._clock()))
        self._to_verify.extend((layered, batch) for batch in self._batches(uploads))
        return layered.gate

    def pump(self) -> None:
        """Submit queued copies and verifications to the lane (the queue of copies to the device) until it is full."""
        while self._to_verify and self._submit_verification():
            pass
        while self._to_upload and self._submit_upload():
            pass

    def drop(self, unwanted: Sequence[Upload]) -> None:
        """End uploads that no promotion waits for any more, except those whose copy to the device was submitted.

        The device slots of the ended uploads become free at once, even if a read into host memory goes on.
        """
        dropped = [upload for upload in unwanted if upload not in self._on_lane]
        for upload in dropped:
            self._coming.pop((upload.fetch, upload.place), None)
            if upload in self._to_upload:
                del self._to_upload[upload]
                self.queued_bytes -= upload.group.memory.block_bytes
        self._end(dropped)

    def is_any_hung(self, uploads: Iterable[Upload]) -> bool:
        """Return whether any of these uploads has been on the lane (copy queue) to the device for at least `LATE_S`."""
        since = self._clock() - LATE_S
        return any(self._on_lane.get(upload, since + 1) <= since for upload in uploads)

    def on_lane_hung(self) -> None:
        """Give up all submitted copies to the device, because their lane (the queue and its threads) hangs.

        The caller must have ended the promotions that wait for these blocks. Until a transfer on the lane ends, lookups
        ignore the lower tiers. Otherwise every new request would wait for the lane too.
        """
        for upload in self._on_lane.keys() - self._hanging:
            assert not upload.waiters, "a promotion waits for a block that hangs"
            del self._uploads[upload.group][upload.name]
            self._hanging.add(upload)
        self._residency.is_cut_off = True
        # Probe the lane, whose other threads may still work. If it is full, one of its transfers serves as the probe.
        self._transfers.submit(Route.HOST_TO_DEVICE, lambda: None, 0, lambda transfer: self._on_lane_moved())

    def num_leases(self, group: GroupTiers) -> int:
        """Return how many of the group's blocks are being loaded. Each of these loads leases its target slot.

        The leases of the promotions that wait for a block are not counted.
        """
        return len(self._uploads[group]) + sum(upload.group is group for upload in self._hanging)

    def check(self) -> None:
        """Raise AssertionError if a lookup can find a block that is still in flight."""
        for upload in self:
            pool = upload.group.pool
            assert pool.name(upload.device_slot) is None, "a block is findable before its bytes have arrived"
            assert not pool.is_free(upload.device_slot), "a block arrives in a slot that is not leased"

    def _submit_upload(self) -> bool:
        """Submit the next batch of copies from host memory to the device; return False if the lane is full."""
        group = next(iter(self._to_upload)).group
        memory = group.memory
        first = islice(self._to_upload, self._batch_blocks[group])
        batch = list(takewhile(lambda upload: upload.group is group, first))
        host_slots = [upload.host_slot for upload in batch if upload.host_slot is not None]
        digests = [upload.digest for upload in batch]
        device_slots = [upload.device_slot for upload in batch]

        def on_uploaded(transfer: Transfer) -> None:
            self._on_lane_moved()
            self._finish(batch, transfer.result if transfer.error is None else [None] * len(batch))

        submitted = self._transfers.submit(
            Route.HOST_TO_DEVICE,
            lambda: upload_blocks(memory, host_slots, digests, device_slots),
            len(batch) * memory.block_bytes,
            on_uploaded,
            len(batch),
        )
        if submitted:
            self._on_lane.update(dict.fromkeys(batch, self._clock()))
            for upload in batch:
                del self._to_upload[upload]
            self.queued_bytes -= len(batch) * memory.block_bytes
        return submitted

    def _submit_verification(self) -> bool:
        layered, batch = self._to_verify[0]
        memory = batch[0].group.memory
        host_slots = [upload.host_slot for upload in batch if upload.host_slot is not None]
        digests = [upload.digest for upload in batch]
        submitted = self._transfers.submit(
            Route.HOST_TO_DEVICE,
            lambda: verify_blocks(memory, host_slots, digests),
            0,
            lambda transfer: self._on_verified(layered, batch, transfer),
        )
        if submitted:
            self._to_verify.popleft()
        return submitted

    def _on_lane_moved(self) -> None:
        # A transfer has ended, so the lane does not hang: lookups may use the lower tiers again.
        self._residency.is_cut_off = False

    def _on_layers_copied(self, layered: LayeredUpload, transfer: Transfer) -> None:
        self._on_lane_moved()
        layered.on_copied(transfer.error is None)
        self._take_in(layered)

    def _on_verified(self, layered: LayeredUpload, batch: Sequence[Upload], transfer: Transfer) -> None:
        self._on_lane_moved()
        layered.on_verified(batch, transfer.result if transfer.error is None else [None] * len(batch))
        self._take_in(layered)

    def _take_in(self, layered: LayeredUpload) -> None:
        if (outcomes := layered.outcomes()) is not None:
            for batch in self._batches(list(outcomes)):
                self._finish(batch, [outcomes[upload] for upload in batch])

    def _finish(self, batch: Sequence[Upload], outcomes: Sequence[bool | None]) -> None:
        """End these uploads.

        *outcomes* says for each block whether its bytes are correct, or None if the copy failed.
        """
        good = [upload for upload, is_good in zip(batch, outcomes, strict=True) if is_good]
        for row in _rows(good):
            self._publish(row)
        self._resolve(good, None)
        for upload, is_good in zip(batch, outcomes, strict=True):
            if is_good is None:
                self._resolve([upload], Reason.FAILED)
            elif not is_good:
                self._residency.lower.forget(upload.group.id, [upload.name])
                self._resolve([upload], Reason.CORRUPT)

    def _publish(self, row: Sequence[Upload]) -> None:
        """Name consecutive blocks of one prompt that have arrived on the device, so that lookups find them.

        If a request has computed and named one of these blocks meanwhile, the promotions that wait for the arrived copy
        use the request's slot instead.
        """
        promotion, block_id = row[0].waiters[0] if row[0].waiters else (None, 0)
        chain = None if promotion is None else promotion.chain
        slots = [upload.device_slot for upload in row]
        names = [upload.name for upload in row]
        tenants = [upload.fetch.tenant(upload.place) for upload in row]
        group = row[0].group
        used = self._residency.publish(group, slots, names, tenants, chain, block_id)
        for upload, slot in zip(row, used, strict=True):
            if slot != upload.device_slot:
                for waiter, place in upload.waiters:
                    group.pool.lease([slot])
                    group.pool.release([upload.device_slot])
                    waiter.tables[group.id][place] = slot

    def _batches(self, uploads: Sequence[Upload]) -> Iterator[list[Upload]]:
        """Yield the uploads in batches, each of one attention group and small enough for one copy."""
        by_group: dict[GroupTiers, list[Upload]] = {}
        for upload in uploads:
            by_group.setdefault(upload.group, []).append(upload)
        for group, members in by_group.items():
            limit = self._batch_blocks[group]
            yield from (members[first : first + limit] for first in range(0, len(members), limit))

    def _resolve(self, uploads: Sequence[Upload], failure: Reason | None) -> None:
        """End the uploads of blocks that have arrived or failed, and call `on_resolved` for each."""
        self._end(uploads)
        self.resolved_at = self._clock()
        for upload in uploads:
            self._on_resolved(upload, failure)

    def _end(self, uploads: Sequence[Upload]) -> None:
        """Remove the uploads and release their leases. In host memory, the end of a prefix is released first."""
        fetched: dict[Fetch, list[int]] = {}
        for upload in reversed(uploads):
            if upload in self._hanging:
                self._hanging.remove(upload)
            else:
                del self._uploads[upload.group][upload.name]
            self._on_lane.pop(upload, None)
            fetched.setdefault(upload.fetch, []).append(upload.place)
        for fetch, places in fetched.items():
            fetch.release(places)
        for group in dict.fromkeys(upload.group for upload in uploads):
            group.pool.release([upload.device_slot for upload in uploads if upload.group is group])


def _rows(uploads: Sequence[Upload]) -> Iterator[list[Upload]]:
    """Yield the uploads in lists of consecutive blocks of one prompt.

    An upload for which no promotion waits any more gets a list of its own.
    """
    row: list[Upload] = []
    for upload in uploads:
        if row and row[-1].waiters and upload.waiters:
            (before, place), (after, next_place) = row[-1].waiters[0], upload.waiters[0]
            if before.chain is after.chain and next_place == place + 1:
                row.append(upload)
                continue
        if row:
            yield row
        row = [upload]
    if row:
        yield row
