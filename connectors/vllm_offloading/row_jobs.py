"""`RowJobs`: vLLM's jobs on the rows of its host pool, as jobs of the disk below."""

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
    """A job that has ended. *good* has the keys of the rows that are now on disk or, after a load, in the pool."""

    job_id: int
    is_load: bool
    keys: Collection[bytes]
    good: Collection[bytes]
    parents: Mapping[bytes, bytes | None]  # for a store, the key of the block before each block, by key
    took_s: float


class RowJobs:
    """The jobs that store and load rows of vLLM's host pool.

    A row is one of vLLM's chunks, in any layout, with vLLM's key. Jobs end in any order, on threads of the disk.
    `take_ended` returns each job once. Owned by vLLM's scheduler.
    """

    def __init__(
        self, disk: DiskBelow, pool: memoryview, row_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Use *pool*, which has the rows' bytes one after the other. `close` releases it."""
        self._disk = disk
        self._pool = pool
        self._row_bytes = row_bytes
        self._clock = clock
        self._ended: deque[EndedRows] = deque()
        self._lineage = WeightsLineage()

    def start_new_lineage(self) -> None:
        """Stop finding blocks stored so far, because the engine's weights may have changed: see `WeightsLineage`."""
        self._lineage.start_new_lineage()

    def holds(self, key: bytes) -> bool:
        """Return whether the block is on disk, without waiting."""
        return self._disk.holds(self._name(key), group_of(key))

    def are_held(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each of these blocks, all of one group, whether it is on disk, without waiting."""
        return self._disk.are_held([self._name(key) for key in keys], group_of(keys[0])) if keys else []

    def load(self, job_id: int, keys: Sequence[bytes], chunk_ids: Iterable[int]) -> None:
        """Begin to read the blocks into these rows, and mark the blocks as just used."""
        rows = [self._row(key, chunk_id, None) for key, chunk_id in zip(keys, chunk_ids, strict=True)]
        self._tell_end(job_id, True, keys, {}, self._disk.load(rows))
        self._disk.touch(rows)

    def store(
        self, job_id: int, keys: Sequence[bytes], chunk_ids: Iterable[int], parents: Mapping[bytes, bytes | None]
    ) -> None:
        """Begin to write the blocks in these rows, given in prefix order.

        *parents* has the key of the block before each block.
        """
        rows = [self._row(key, chunk_id, parents.get(key)) for key, chunk_id in zip(keys, chunk_ids, strict=True)]
        self._tell_end(job_id, False, keys, parents, self._disk.store(rows))

    def fail(self, job_id: int, keys: Sequence[bytes], *, is_load: bool) -> None:
        """End a job that could not be begun, with all of its blocks failed."""
        self._ended.append(EndedRows(job_id, is_load, keys, (), {}, 0.0))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark these blocks as just used, so that they are evicted later. *keys* are of one group, in prefix order.

        Only the last block that is on disk is marked, because blocks are evicted before their parents.
        """
        held = [key for key, is_held in zip(keys, self.are_held(keys), strict=True) if is_held]
        if held:
            self._disk.touch([BlockRow(self._name(held[-1]), self._pool[:0], group_of(held[-1]))])

    def take_ended(self) -> list[EndedRows]:
        """Return the jobs that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def drain(self, timeout_s: float) -> bool:
        """Wait until all jobs have ended, so that no row is read or written. Return False on timeout."""
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
