"""`TierSide`: the logic of `KVTier`, without vLLM's classes."""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby

from kvtier.connectors.disk_below.disk_below import DiskBelow
from kvtier.connectors.vllm_offloading.pool_room import HostPool, PoolRoom, Verdict
from kvtier.connectors.vllm_offloading.request_chain import RequestChain, group_of
from kvtier.connectors.vllm_offloading.row_jobs import EndedRows, RowJobs
from kvtier.connectors.vllm_offloading.tier_counts import TierCounts

MAX_HOLES = 8192  # if there are more, the oldest are forgotten
MAX_AT_ONCE = 64  # blocks per offer
PAUSE_S = 1.0  # pause between two offers, because a disk that refuses a block often refuses more for a while
TOUCHED_KEYS = 256  # at a request's end, look for its last block on disk among this many last keys of each group
GAUGES_EVERY_S = 1.0


class Holes:
    """Blocks that the disk refused to store. They are offered to the disk again, a few at a time.

    vLLM itself offers a block only once, when the block is new. But vLLM may keep the block in host memory for hours,
    so the block can still be stored later. Only vLLM's scheduler calls the methods.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._parents: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._next_at = float("-inf")

    def __len__(self) -> int:
        return len(self._parents)

    def add(self, key: bytes, parent: bytes | None) -> None:
        """Record that a block was not stored. *parent* is the key of the block before it in the prompt."""
        if not self._parents:
            self._next_at = self._clock() + PAUSE_S
        self._parents[key] = parent
        while len(self._parents) > MAX_HOLES:
            self._parents.popitem(last=False)

    def clear(self) -> None:
        """Forget all unstored blocks, so that none is offered to the disk again."""
        self._parents.clear()

    def take(self) -> Mapping[bytes, bytes | None]:
        """Remove and return a few blocks for another attempt to store them, each with the key of the block before it.

        The result is empty during the pause after an attempt.
        """
        if not self._parents or self._clock() < self._next_at:
            return {}
        self._next_at = self._clock() + PAUSE_S
        return dict(self._parents.popitem(last=False) for _ in range(min(MAX_AT_ONCE, len(self._parents))))


class TierSide:
    """The disk tier below vLLM's host pool.

    Only vLLM's scheduler calls the methods. Only `drain` and `close` wait for the disk.
    """

    def __init__(
        self,
        disk: DiskBelow,
        pool: memoryview,
        row_bytes: int,
        longest_job_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the tier on *disk*. *pool* is the memory of vLLM's host pool, row after row. `close` releases it.

        *longest_job_s* is the time within which every job ends, even if the disk hangs.
        """
        self.counts = TierCounts()
        self._disk = disk
        self._jobs = RowJobs(disk, pool, row_bytes, clock)
        self._holes = Holes(clock)
        self._room = PoolRoom(len(pool) // row_bytes, clock)
        self._longest_job_s = longest_job_s
        self._clock = clock
        self._gauges_at = float("-inf")
        self._num_corrupt = 0  # corrupt blocks that are already in the counts

    def see_pool(self, pool: HostPool) -> None:
        """Set vLLM's host pool, as far as vLLM shows it."""
        self._room.see(pool)

    def holds(self, key: bytes) -> bool:
        """Return whether the block is on disk, without waiting."""
        return self._jobs.holds(key)

    def look_up(self, key: bytes, request_id: str) -> Verdict:
        """Return what vLLM does about a block that is not in its host pool, without waiting.

        If the result is `LOAD`, vLLM takes a chunk of its pool for the block before the next call.
        """
        return self._room.verdict(request_id, key) if self.holds(key) else Verdict.COMPUTE

    def on_step_end(self, started: Iterable[str]) -> None:
        """Prepare for the lookups of vLLM's next step. *started* has the requests that vLLM runs since this step."""
        self._room.on_step_end(started)

    def load(self, job_id: int, keys: Sequence[bytes], chunk_ids: Iterable[int]) -> None:
        """Begin to read blocks from disk into the chunks *chunk_ids* of vLLM's host pool."""
        self._jobs.load(job_id, keys, chunk_ids)

    def store(
        self,
        job_id: int,
        keys: Collection[bytes],
        chunk_ids: Iterable[int],
        parents: Mapping[bytes, bytes | None],
        end_tokens: Mapping[bytes, int],
    ) -> None:
        """Begin to write the blocks in the chunks *chunk_ids* of vLLM's host pool to disk, in the order of the prompt.

        *parents* has, for each key, the key of the block before it. *end_tokens* has the position at which each block
        ends in the prompt.
        """
        both = sorted(zip(keys, chunk_ids, strict=True), key=lambda each: end_tokens.get(each[0], 0))
        self._jobs.store(job_id, [key for key, _ in both], [chunk_id for _, chunk_id in both], parents)

    def fail(self, job_id: int, keys: Sequence[bytes], *, is_load: bool) -> None:
        """Record that a job could not be started. `take_ended` returns it with all its blocks failed."""
        self._jobs.fail(job_id, keys, is_load=is_load)

    def take_ended(self) -> list[EndedRows]:
        """Return the jobs that have ended since the last call, and count their blocks."""
        ended = self._jobs.take_ended()
        for job in ended:
            num_bad = len(job.keys) - len(job.good)
            if job.is_load:
                self.counts.loaded_blocks += len(job.good)
                self.counts.failed_loads += num_bad
                if num_bad:
                    self._count_corrupt()
                continue
            self.counts.stored_blocks += len(job.good)
            self.counts.unstored_blocks += num_bad
            if num_bad:
                good = set(job.good)
                for key in job.keys:
                    if key not in good:
                        self._holes.add(key, job.parents.get(key))
        return ended

    def on_request_finished(self, chain: RequestChain, request_id: str) -> None:
        """Mark the request's blocks on disk as just used, even if the request got them from another tier."""
        self.counts.waited_requests += self._room.on_finished(request_id)
        for keys in chain.groups:
            self._jobs.touch(keys[-TOUCHED_KEYS:])

    def take_unstored(self) -> Mapping[bytes, bytes | None]:
        """Return a few blocks to offer to the disk again, each with the key of the block before it."""
        holes = self._holes.take()
        absent = set[bytes]()
        for _, group in groupby(sorted(holes, key=group_of), group_of):
            keys = list(group)
            absent |= {key for key, is_held in zip(keys, self._jobs.are_held(keys), strict=True) if not is_held}
        return {key: parent for key, parent in holes.items() if key in absent}

    def put_back(self, holes: Mapping[bytes, bytes | None]) -> None:
        """Take back blocks that `take_unstored` returned but that cannot be stored yet, so that it returns them again.

        *holes* has, for the key of each block, the key of the block before it.
        """
        for key, parent in holes.items():
            self._holes.add(key, parent)

    def gauges(self) -> dict[str, int]:
        """Return the values of the metrics in `GAUGES`, at most once per second; otherwise return an empty dict."""
        if self._clock() < self._gauges_at + GAUGES_EVERY_S:
            return {}
        self._gauges_at = self._clock()
        tier = self._disk.statistics().tier
        return {"blocks": tier.num_blocks, "stored_bytes": tier.num_bytes, "capacity_bytes": tier.capacity_bytes}

    def start_new_lineage(self) -> None:
        """Hide the blocks stored so far from lookups, because the weights may have changed: see `WeightsLineage`.

        Call this when vLLM drains its tiers. vLLM does so only when it resets its cache, for example after a weight
        update.
        """
        self._jobs.start_new_lineage()
        self._holes.clear()

    def drain(self) -> bool:
        """Wait until all jobs have ended, so that none uses vLLM's host pool.

        Returns:
            False if this takes longer than *longest_job_s*. The disk is then closed, and lookups find no block.
        """
        if self._jobs.drain(self._longest_job_s):
            return True
        self._disk.close()
        return False

    def close(self) -> None:
        """End all jobs, close the disk, and release the pool's memory."""
        self._jobs.close()

    def _count_corrupt(self) -> None:
        num_corrupt = sum(self._disk.statistics().tier.corrupt.values())
        self.counts.corrupt_blocks += num_corrupt - self._num_corrupt
        self._num_corrupt = num_corrupt
