"""`DiskBelow`: a disk tier for an engine that manages its own host memory."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

from kvtier.connectors.disk_below.job import Job, Outcomes
from kvtier.connectors.disk_below.loads import Loads
from kvtier.connectors.disk_below.row_index import BlockRow, RowIndex
from kvtier.connectors.disk_below.writes import Refusal, Writes
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.index_load import IndexLoad
from kvtier.tiers.lower.reads import ReadableDisk, ReadProbe
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.lane import Lane, Transfer
from kvtier.transfer.transfer_engine import Route, RouteStatistics, TransferEngine


class InlineQueue(queue.SimpleQueue[Transfer]):
    """A queue of finished transfers. The thread that puts a transfer also processes it at once."""

    def __init__(self, take: Callable[[], None]) -> None:
        """Create an empty queue. `put` calls *take*, which must process all transfers in the queue."""
        super().__init__()
        self._take = take

    def put(self, item: Transfer, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self._take()


MakeLanes = Callable[[InlineQueue], Mapping[Route, Lane]]


@dataclass(frozen=True, slots=True)
class DiskBelowStatistics:
    """A snapshot of the counts of a `DiskBelow`. A row is one block. Counts of rows are totals since the start."""

    tier: TierStatistics
    disk: DiskStatistics
    routes: Mapping[Route, RouteStatistics]
    num_stored: int  # rows
    num_loaded: int  # verified rows
    num_failed_loads: int  # rows
    refused: Mapping[Refusal, int]  # rows that were offered but not stored, by reason
    queued_bytes: int  # of rows that wait to be written


class DiskBelow:
    """A disk tier that stores and loads the blocks of an engine that manages its own host memory.

    A *row* is one block together with the engine's memory for its bytes. Loaded bytes are verified. Disk faults raise
    no exceptions: if a block is unreadable, corrupt or too late, the load of its row fails.

    Lookups do not wait, because the index is in memory. `load` and `store` begin a job and return its future at once.
    Jobs end in any order. The caller must not touch the memory of a job's rows until the job has ended. Callbacks of
    the future must be short, because they run on the thread that ends the job: a reader, a writer or the caller's
    thread. All methods may be called from any thread.

    One lock guards the tier's state. No thread copies bytes or waits for the disk while it holds the lock.
    """

    def __init__(
        self,
        disk: DiskTier,
        make_lanes: MakeLanes,
        num_readers: int,
        max_queued_bytes: int,
        row_bytes: Callable[[int], int],
        end_store: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the tier, and begin to load the index of *disk*.

        Args:
            disk: The store of blocks.
            make_lanes: Returns the lanes (transfer threads), which put finished transfers into the given queue:
                `Route.DISK_TO_HOST` with *num_readers* threads, and `Route.HOST_TO_DISK`.
            num_readers: Number of reader threads.
            max_queued_bytes: Limit on the bytes that wait to be written.
            row_bytes: Returns the number of bytes of a block, given its group.
            end_store: Closes the store at once. Called by `close`.
            clock: Returns the time in seconds.
        """
        self._lock = threading.RLock()
        finished = InlineQueue(self._take_finished)
        self._lanes = make_lanes(finished)
        self._transfers = TransferEngine(self._lanes, finished)
        self._disk = disk
        self._end_store = end_store
        self._index = RowIndex(disk)
        self._index_load = IndexLoad(self._index, self._transfers, clock)
        self._probe = ReadProbe(ReadableDisk(self._index), row_bytes, self._transfers, clock)
        self._loads = Loads(self._index, self._transfers, num_readers)
        self._writes = Writes(self._index, self._transfers, max_queued_bytes)
        self._jobs: set[Job] = set()  # jobs that have not ended
        self._is_closing = False
        with self._lock:
            self._index_load.go_on()

    def holds(self, name: BlockName, group_id: int = 0) -> bool:
        """Return whether the block is on disk and, as far as is known, readable."""
        with self._lock:
            self._go_on()
            return self._disk.holds(group_id, name)

    def are_held(self, names: Sequence[BlockName], group_id: int = 0) -> list[bool]:
        """Return for each of the blocks whether it is on disk and, as far as is known, readable."""
        with self._lock:
            self._go_on()
            is_held: list[bool] = self._disk.are_held(group_id, names).tolist()
            return is_held

    def num_held(self, names: Sequence[BlockName], group_id: int = 0) -> int:
        """Return how many of the blocks are on disk before the first one that is missing."""
        with self._lock:
            self._go_on()
            return self._disk.num_held(group_id, names)

    def load(self, rows: Sequence[BlockRow]) -> Outcomes:
        """Read rows from disk into their memory. The future has True for each row that was read and verified.

        If the load of a row fails, its memory has undefined contents. Lookups no longer find a block that could not be
        read.
        """
        return self._begin(rows, self._loads.begin)

    def store(self, rows: Sequence[BlockRow]) -> Outcomes:
        """Write blocks from the engine's memory to disk. The future has True for each block that is then on disk.

        The blocks are given in the order of the prompt. A block that could not be stored may be offered again;
        `statistics` counts such blocks by reason.
        """
        return self._begin(rows, self._writes.begin)

    def touch(self, rows: Sequence[BlockRow]) -> None:
        """Mark the blocks of these rows as recently used, to delay their eviction. Does not access the rows' memory."""
        with self._lock:
            self._writes.touch(rows)

    def clear(self, timeout_s: float) -> bool:
        """Delete all blocks of the engine's namespace from disk. Blocks that are stored in the meantime may stay.

        Returns:
            False if the current jobs do not end within *timeout_s*, or if the disk cannot delete the blocks.
        """
        if not self.drain(timeout_s) or not self._disk.clear():
            return False
        with self._lock:
            self._disk.index.empty()
        return True

    def wait_indexed(self, timeout_s: float) -> bool:
        """Wait until all blocks that were on disk at the start are indexed. Return False on timeout."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._go_on()
                if self._disk.is_open and self._disk.index.is_loaded:
                    return True
            if time.monotonic() > give_up_at:
                return False
            time.sleep(0.002)

    def statistics(self) -> DiskBelowStatistics:
        """Return a snapshot of all counts."""
        with self._lock:
            return DiskBelowStatistics(
                self._disk.statistics(),
                self._disk.details(),
                self._transfers.statistics(),
                self._writes.num_stored,
                self._loads.num_loaded,
                self._loads.num_failed,
                dict(self._writes.refused),
                self._writes.queued_bytes,
            )

    def drain(self, timeout_s: float) -> bool:
        """Wait until all current jobs have ended, so that their memory is no longer used. Return False on timeout."""
        with self._lock:
            futures = [job.future for job in self._jobs]
        return not wait(futures, timeout_s).not_done

    def close(self) -> None:
        """End all jobs and close the store. Waiting jobs fail, and later lookups find nothing.

        On return, the rows' memory is no longer used, unless a read hangs in the kernel (see `ThreadLane.close`). A
        second call does nothing.
        """
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        for lane in self._lanes.values():
            lane.close()  # not under the lock, because the lane's threads need the lock to end
        self._end_store()
        with self._lock:
            self._transfers.close()
        self._take_finished()
        with self._lock:
            self._disk.index.empty()

    def _begin(self, rows: Sequence[BlockRow], begin: Callable[[Job], None]) -> Outcomes:
        job = Job(rows)
        with self._lock:
            self._jobs.add(job)
            if self._is_closing:
                job.end(range(len(rows)), [False] * len(rows))
            else:
                self._go_on()
                begin(job)
            ended = self._take_ended()
        for each in ended:
            each.tell()
        return job.future

    def _go_on(self) -> None:
        """Continue to load the index. If the circuit breaker is open after failures, probe the disk."""
        if not self._is_closing:
            self._index_load.go_on()
            self._probe.go_on()

    def _take_finished(self) -> None:
        """Process finished transfers. Called on the thread that finished them."""
        with self._lock:
            self._transfers.poll()
            ended = self._take_ended()
        for job in ended:
            job.tell()

    def _take_ended(self) -> list[Job]:
        ended = [job for job in self._jobs if job.has_ended]
        self._jobs.difference_update(ended)
        return ended
