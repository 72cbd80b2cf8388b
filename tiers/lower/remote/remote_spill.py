"""Writes of blocks from host memory to the remote tier, after the blocks have been used a second time."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, islice

import numpy as np

from kvtier.store.blob_store import Blob
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.breaker import HUNG_S, Attempt
from kvtier.tiers.lower.copies import Copies, CopyBatch, blocks_in_batch
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.lower.remembered_blocks import RememberedBlocks
from kvtier.tiers.lower.remote.remote_tier import RemoteTier
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.block_memory import HostMemory
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

MAX_WANTED = 1 << 16  # maximum number of blocks of a group that wait to be written
MAX_MISSED = 1 << 20  # maximum number of remembered blocks that missed once; they take 8 MiB
MAX_IN_BATCH = 256  # blocks
MAX_IN_FLIGHT = 2  # batches: one being written and one behind it
BATCH_BYTES = 64 << 20  # large, because some stores pack the blocks of a batch into one object


@dataclass(eq=False, slots=True)
class RemoteBatch(CopyBatch):
    """Blocks of one attention group being written to the remote tier."""

    group_id: int
    spoilt: frozenset[bytes]  # keys of the batch under which the store has a bad record, which is to be overwritten
    attempt: Attempt


class RemoteSpill:
    """The writer of blocks from host memory to the remote tier. The first blocks of a prefix are written first.

    A block becomes *wanted* (to be written) when it is used a second time: a request hits it, or misses it for the
    second time. A wanted block that is not in host memory is written when it has arrived there. A block that is evicted
    from host memory before it is written becomes wanted again at its next use. A request uses all blocks of its prefix,
    so the stored prefixes have no gaps. Owned by the tiers' thread.
    """

    def __init__(
        self,
        index: LowerIndex,
        remote: RemoteTier,
        memories: Sequence[HostMemory],
        transfers: TransferEngine,
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._remote = remote
        self._memories = memories
        self._clock = clock
        self._wanted: list[OrderedDict[BlockName, None]] = [OrderedDict() for _ in memories]  # by group, in host memory
        self._awaited: list[OrderedDict[BlockName, None]] = [OrderedDict() for _ in memories]  # not in host memory yet
        self._missed = RememberedBlocks(MAX_MISSED)  # blocks that missed once
        self.copies = Copies[RemoteBatch](Route.HOST_TO_REMOTE, transfers, MAX_IN_FLIGHT, clock)

    @property
    def num_wanted(self) -> int:
        """Number of blocks in host memory that are to be written or are being written."""
        return sum(map(len, self._wanted)) + sum(len(batch.names) for batch in self.copies.batches)

    def want(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Mark these blocks as wanted, unless the store is believed to have them. They are written in this order."""
        is_in_host = self._index.host[group_id].pool.find_all(names) != ABSENT
        is_new = ~self._remote.presence.are_held(group_id, names)
        _note(self._wanted[group_id], list(compress(names, (is_new & is_in_host).tolist())))
        _note(self._awaited[group_id], list(compress(names, (is_new & ~is_in_host).tolist())))

    def on_come(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Handle blocks that arrived in host memory from the device. The last block of a prefix comes first."""
        if awaited := self._awaited[group_id]:
            come = [name for name in reversed(names) if name in awaited]
            for name in come:
                del awaited[name]
            _note(self._wanted[group_id], come)

    def on_missed(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Handle a request that missed the blocks *names*.

        *names* are the rest of a prefix, from the first block that no faster tier has. A block that an earlier request
        has missed too will be written to the store when it arrives in host memory.
        """
        if not names:
            return
        were_missed = self._missed.has(group_id, names)
        self._missed.remember(group_id, [name for name, was in zip(names, were_missed, strict=True) if not was])
        _note(self._awaited[group_id], list(compress(names, were_missed)))

    def spill(self) -> None:
        """Start to write the blocks that wait to be written, and report hung writes to the circuit breaker."""
        for batch in self.copies.stalled_since(self._clock() - HUNG_S):
            self._remote.writing.on_hung(batch.attempt)
        for group_id in range(len(self._memories)):
            while self._wanted[group_id] and self._start(group_id):
                pass

    def clear(self) -> None:
        """Forget all blocks that wait to be written."""
        for names in (*self._wanted, *self._awaited):
            names.clear()

    def _start(self, group_id: int) -> bool:
        """Start to write one batch. Return False if that is impossible now or no wanted block is left."""
        pool, memory = self._index.host[group_id].pool, self._memories[group_id]
        limit = self.copies.max_blocks(pool, blocks_in_batch(memory.block_bytes, 1, MAX_IN_BATCH, BATCH_BYTES))
        if not limit or not self._remote.writing.allows():
            return False
        names = list(islice(self._wanted[group_id], limit))
        for name in names:
            del self._wanted[group_id][name]
        slots = pool.find_all(names)
        slots = slots[(slots != ABSENT) & ~self._remote.presence.are_held(group_id, names)].astype(np.intp)
        attempt = self._remote.writing.begin() if len(slots) else None
        if attempt is None:
            return bool(names)
        blobs = self._blobs(group_id, slots.tolist())
        spoilt = self._remote.spoilt([blob.key for blob in blobs])
        batch = RemoteBatch(pool, pool.rows(slots), slots, self._clock(), group_id, spoilt, attempt)
        put = [there for slot in slots.tolist() if (there := pool.name(slot)) is not None]
        remote, num_bytes = self._remote, len(slots) * memory.block_bytes
        if not self.copies.start(
            batch, num_bytes, lambda: remote.write(blobs, spoilt), lambda done: self._on_written(batch, put, done)
        ):
            self._end(batch, LaneClosed())
            return False
        return True

    def _blobs(self, group_id: int, slots: Sequence[int]) -> list[Blob]:
        """Return the blocks in these host slots as blobs that refer to the slots' memory, without a copy."""
        pool, memory, remote = self._index.host[group_id].pool, self._memories[group_id], self._remote
        digest_of, blobs = self._index.host_blocks[group_id].digest, []
        for slot in slots:
            name, origin = pool.name(slot), self._index.origin_in_host(group_id, slot)
            assert name is not None, "a slot without a block is to be put"
            parent = b"" if origin.parent is None else remote.key(group_id, origin.parent)
            blobs.append(Blob(remote.key(group_id, name), digest_of(slot), memory.host_block(slot), parent))
        return blobs

    def _on_written(self, batch: RemoteBatch, names: Sequence[BlockName], transfer: Transfer) -> None:
        if transfer.error is None:
            are_there, num_put = transfer.result
            self._remote.presence.add(batch.group_id, list(compress(names, are_there)))
            self._remote.on_written(batch.spoilt)
            self._remote.counts["stored"] += num_put
            self._remote.counts["there"] += sum(are_there) - num_put
            self._remote.counts["refused"] += len(names) - sum(are_there)
        elif not isinstance(transfer.error, LaneClosed):
            self._remote.counts["refused"] += len(names)
        self._end(batch, transfer.error)

    def _end(self, batch: RemoteBatch, error: BaseException | None) -> None:
        self.copies.end(batch)
        if error is None:
            self._remote.writing.on_succeeded(batch.attempt)
        elif isinstance(error, LaneClosed):
            self._remote.writing.withdraw(batch.attempt)
        else:
            self._remote.writing.on_failed(batch.attempt)


def _note(noted: OrderedDict[BlockName, None], names: Sequence[BlockName]) -> None:
    """Insert *names* at the front of *noted*, and drop all names after the first `MAX_WANTED`."""
    # At the front, because the parts of a long prefix come in separate calls, the last part first.
    for name in reversed(names):
        noted[name] = None
        noted.move_to_end(name, last=False)
    while len(noted) > MAX_WANTED:
        noted.popitem()
