"""`RowJobs`: vLLM's jobs that store rows of its host pool on disk, and load rows from disk."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvtier.connectors.disk_below.disk_below import DiskBelow
from kvtier.connectors.disk_below.job import Outcomes
from kvtier.connectors.disk_below.row_index import BlockRow
from kvtier.connectors.vllm_offloading.request_chain import group_of, name_of
from kvtier.connectors.weights_lineage import WeightsLineage
from kvtier.tiers.naming.block_hash import BlockName


@dataclass(frozen=True, slots=True)
class EndedRows:
    """A store or load job that has ended. *good* has the keys of the blocks for which the job succeeded."""

    job_id: int
    is_load: bool
    keys: Collection[bytes]
    good: Collection[bytes]
    parents: Mapping[bytes, bytes | None]  # for a store: for each key, the key of the block before it
    took_s: float


class RowJobs:
    """The jobs that copy blocks between vLLM's host pool and the disk.

    A row is the memory of one block in the host pool, which vLLM calls a chunk. Jobs end in any order, on the disk
    tier's threads. `take_ended` returns each job once. Only vLLM's scheduler calls the methods.
    """

    def __init__(
        self, disk: DiskBelow, pool: memoryview, row_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start without jobs. *pool* is the memory of vLLM's host pool, row after row. `close` releases it."""
        self._disk = disk
        self._pool = pool
        self._row_bytes = row_bytes
        self._clock = clock
        self._ended: deque[EndedRows] = deque()
        self._lineage = WeightsLineage()

    def start_new_lineage(self) -> None:
        """Hide the blocks stored so far from lookups, because the weights may have changed: see `WeightsLineage`."""
        self._lineage.start_new_lineage()

    def holds(self, key: bytes) -> bool:
        """Return whether the block is on disk, without waiting."""
        return self._disk.holds(self._name(key), group_of(key))

    def are_held(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each block whether it is on disk, without waiting. The blocks must be of one group."""
        return self._disk.are_held([self._name(key) for key in keys], group_of(keys[0])) if keys else []

    def load(self, job_id: int, keys: Sequence[bytes], chunk_ids: Iterable[int]) -> None:
        """Begin to read blocks from disk into chunks of vLLM's host pool, and mark the blocks as just used."""
        rows = [self._row(key, chunk_id, None) for key, chunk_id in zip(keys, chunk_ids, strict=True)]
        self._tell_end(job_id, True, keys, {}, self._disk.load(rows))
        self._disk.touch(rows)

    def store(
        self, job_id: int, keys: Sequence[bytes], chunk_ids: Iterable[int], parents: Mapping[bytes, bytes | None]
    ) -> None:
        """Begin to write the blocks in the chunks *chunk_ids* of vLLM's host pool to disk. *keys* are in prefix order.

        *parents* has, for each key, the key of the block before it.
        """
        rows = [self._row(key, chunk_id, parents.get(key)) for key, chunk_id in zip(keys, chunk_ids, strict=True)]
        self._tell_end(job_id, False, keys, parents, self._disk.store(rows))

    def fail(self, job_id: int, keys: Sequence[bytes], *, is_load: bool) -> None:
        """Record that a job could not be started. `take_ended` returns it with all its blocks failed."""
        self._ended.append(EndedRows(job_id, is_load, keys, (), {}, 0.0))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark these blocks as just used, so that they are evicted later. *keys* are of one group, in prefix order.

        It is enough to mark the last of them that is on disk, because a block is never evicted before the blocks that
        follow it in the prompt.
        """
        held = [key for key, is_held in zip(keys, self.are_held(keys), strict=True) if is_held]
        if held:
            self._disk.touch([BlockRow(self._name(held[-1]), self._pool[:0], group_of(held[-1]))])

    def take_ended(self) -> list[EndedRows]:
        """Return the jobs that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def drain(self, timeout_s: float) -> bool:
        """Wait until all jobs have ended, so that none uses vLLM's host pool. Return False on timeout."""
        return self._disk.drain(timeout_s)

    def close(self) -> None:
        """End all jobs, close the disk, and release the pool's memory."""
        self._disk.close()
        with suppress(BufferError):  # a view of a row still exists
            self._pool.release()

    def _row(self, key: bytes, chunk_id: int, parent: bytes | None) -> BlockRow:
        start = int(chunk_id) * self._row_bytes
        memory = self._pool[start : start + self._row_bytes]
        if memory.nbytes != self._row_bytes:
            raise IndexError(f"chunk {chunk_id} is not in the pool of {self._pool.nbytes // self._row_bytes} chunks")
        return BlockRow(self._name(key), memory, group_of(key), None if parent is None else self._name(parent))

    def _name(self, key: bytes) -> BlockName:
        return self._lineage.name(name_of(key))

    def _tell_end(
        self,
        job_id: int,
        is_load: bool,
        keys: Sequence[bytes],
        parents: Mapping[bytes, bytes | None],
        outcomes: Outcomes,
    ) -> None:
        began_at = self._clock()

        def on_end(ended: Outcomes) -> None:
            good = [key for key, is_good in zip(keys, ended.result(), strict=True) if is_good]
            self._ended.append(EndedRows(job_id, is_load, keys, good, parents, self._clock() - began_at))

        outcomes.add_done_callback(on_end)
