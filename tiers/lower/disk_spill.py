"""DiskSpill: writes blocks of host memory to disk before their slots are needed for other blocks.

A host slot is *dirty* while its block has yet to be written to disk, and otherwise *clean*.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.store.blob_store import Blob, StoreFull
from kvtier.store.record import DIGEST_BYTES
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.device.slot_ids import NOTHING, Ids
from kvtier.tiers.lower.breaker import HUNG_S, Attempt
from kvtier.tiers.lower.copies import HUNG_COPY_S, CleanAhead, Copies, CopyBatch, blocks_in_batch
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import tenant_with
from kvtier.transfer.block_memory import HostMemory
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

MAX_IN_BATCH = 64  # blocks per batch, because each is looked up before and after the write
MAX_STARTED = 256  # blocks submitted per call; the next call continues
MAX_IN_FLIGHT = 4  # batches per group: enough to keep the disk busy


@dataclass(eq=False, slots=True)
class DiskBatch(CopyBatch):
    """A batch of blocks being written to disk."""

    group_id: int
    attempt: Attempt
    # Blocks of this batch that left the disk according to the outcome of another batch, which was processed earlier. It
    # is unknown whether they left before or after this batch wrote them, so they count as no longer on disk.
    pushed_out: set[BlockName] = field(default_factory=set)


class DiskSpill:
    """Writes all dirty blocks of host memory to disk, starting with those that have been dirty longest.

    It does not wait until a block's slot is needed, because nearly all blocks have to be written anyway. Owned by the
    tiers' thread.
    """

    def __init__(
        self,
        index: LowerIndex,
        memories: Sequence[HostMemory],
        transfers: TransferEngine,
        windows: Sequence[CleanAhead],
        clock: Callable[[], float],
    ) -> None:
        """Create a writer to disk.

        *windows* has for each attention group the `CleanAhead` that sets how many host slots should be clean. It is
        told the duration of each write, because slow writes must start earlier.
        """
        self._index = index
        self._host = index.host
        self._disk = index.disk
        self._memories = memories
        self._batch_blocks = [blocks_in_batch(memory.block_bytes, 1, MAX_IN_BATCH) for memory in memories]
        self._windows = windows
        self._clock = clock
        self.copies = Copies[DiskBatch](Route.HOST_TO_DISK, transfers, MAX_IN_FLIGHT, clock)
        self.num_stored = 0  # blocks written so far

    def spill(self) -> None:
        """Start the writes that are due, and report hung ones to the circuit breaker."""
        for batch in self.copies.stalled_since(self._clock() - HUNG_S):
            self._disk.writing.on_hung(batch.attempt)
        for group_id in range(len(self._memories)):
            num_started = 0
            while num_started < MAX_STARTED and (num_more := self._start(group_id)):
                num_started += num_more

    def on_gone(self, keys: Sequence[bytes], besides: DiskBatch | None = None) -> None:
        """Record in all batches in flight, except *besides*, that blocks with these keys were removed from the disk.

        A batch may have written such a block just before the removal. The end of the batch must then not count that
        block as on disk.
        """
        others = [other for other in self.copies.batches if other is not besides]
        if others and keys:
            blocks = {block for key in keys if (block := self._disk.block_of(key)) is not None}
            for other in others:
                other.pushed_out.update(name for name in other.names if (other.group_id, name) in blocks)

    @property
    def is_making_progress(self) -> bool:
        """True if it makes sense to wait for clean host slots: writes to disk are in flight and do not hang."""
        return not self._disk.is_failing and self.copies.is_making_progress(self._clock() - HUNG_COPY_S)

    @property
    def num_dirty(self) -> int:
        """Number of dirty blocks of host memory."""
        return sum(len(host.dirty) for host in self._host)

    def _start(self, group_id: int) -> int:
        """Submit one batch of a group's dirty blocks and return its size; 0 if nothing can be written now."""
        pool, limit = self._host[group_id].pool, 0
        if self._host[group_id].dirty and self._disk.may_write():
            limit = self.copies.max_blocks(pool, self._batch_blocks[group_id])
        slots, rows = self._dirty(group_id, limit) if limit else (NOTHING, [])
        if not len(slots) or (attempt := self._disk.writing.begin()) is None:
            return 0
        batch = DiskBatch(pool, rows, slots, self._clock(), group_id, attempt)
        num_bytes = len(slots) * self._memories[group_id].block_bytes
        if not self.copies.start(
            batch, num_bytes, self._work(batch), lambda transfer: self._on_written(batch, transfer)
        ):
            self._end(batch, LaneClosed())
            return 0
        return len(slots)

    def _dirty(self, group_id: int, limit: int) -> tuple[Ids, list[NamedSpan]]:
        """Return up to *limit* dirty host slots that are not being written, and the names of their blocks.

        Slots whose block turns out to be on disk are marked clean and left out.
        """
        pool, dirty = self._host[group_id].pool, self._host[group_id].dirty
        num_on_the_way = self.copies.num_leases(pool)
        slots = self.copies.without(pool, dirty.oldest(limit + num_on_the_way))[:limit]
        rows = pool.rows(slots)
        is_on_disk = self._disk.are_held(group_id, [name for row in rows for name in row.names])
        if not is_on_disk.any():
            return slots, rows
        dirty.remove(slots[is_on_disk])
        return slots[~is_on_disk], pool.rows(slots[~is_on_disk])

    def _work(self, batch: DiskBatch) -> Callable[[], object]:
        """Return a function that writes the batch, for a copy thread to call. It uses no state of this object.

        The copy thread creates the `Blob` objects, so that the owner's thread spends little time per block.
        """
        disk, memory, group_id = self._disk, self._memories[batch.group_id], batch.group_id
        blocks, names, slots = self._index.host_blocks[group_id], batch.names, batch.source_slots.tolist()
        parents = self._index.parents(group_id, batch.rows)
        digests, tenants = blocks.digests(batch.source_slots), blocks.tenants(batch.source_slots).tolist()

        def write() -> object:
            blobs = [
                Blob(
                    disk.key(group_id, name),
                    digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES],
                    memory.host_block(slot),
                    b"" if parent is None else disk.key(group_id, parent),
                    tenant_with(tenant),
                )
                for place, (name, slot, parent, tenant) in enumerate(zip(names, slots, parents, tenants, strict=True))
            ]
            return disk.write(blobs)

        return write

    def _on_written(self, batch: DiskBatch, transfer: Transfer) -> None:
        """End a batch whose write has finished. Add its blocks to the index, and remove blocks that were evicted."""
        group_id = batch.group_id
        if transfer.error is None:
            cause = self._disk.on_written(transfer.result)
            self.num_stored += len(batch.names)
            self._windows[group_id].on_spilled(self._clock() - batch.submitted_at)
            # The batch leases its slots until it ends. So even if a block was evicted, no other block is in its slot.
            self._host[group_id].dirty.remove(batch.source_slots)
            there = [name for name in batch.names if name not in batch.pushed_out]
            if transfer.result.evicted:
                self.on_gone(transfer.result.evicted, besides=batch)
            self._index.on_written(group_id, there, transfer.result.evicted, cause)
        elif isinstance(transfer.error, StoreFull):
            self.on_gone(transfer.error.evicted, besides=batch)
            self._index.on_written(group_id, (), transfer.error.evicted)
        if self._index.spills is not None:
            num_held = int(np.count_nonzero(self._disk.index.are_held(group_id, batch.names)))
            self._index.spills.on_copied(Route.HOST_TO_DISK, batch, transfer, len(batch.names) - num_held)
        self._end(batch, transfer.error)

    def _end(self, batch: DiskBatch, error: BaseException | None) -> None:
        self.copies.end(batch)
        if error is None:
            self._disk.writing.on_succeeded(batch.attempt)
        elif isinstance(error, LaneClosed):
            self._disk.writing.withdraw(batch.attempt)
        else:
            self._disk.writing.on_failed(batch.attempt)
