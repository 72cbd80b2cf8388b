"""`Writes`: a queue of blocks to write from an engine's memory to disk."""

from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum

from kvtier.connectors.disk_below.job import Job, JobQueue, Part, cut
from kvtier.connectors.disk_below.row_index import BlockRow, RowIndex
from kvtier.store.blob_store import Blob, StoreFull
from kvtier.store.record import digest
from kvtier.tiers.lower.disk_tier import Written
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.lane import Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

MAX_PART_BYTES = 8 << 20
MAX_PART_ROWS = 64
MAX_IN_FLIGHT = 3  # parts: two threads write one each, and one part waits


class Refusal(StrEnum):
    """The reason why a block was not stored. The caller may offer the block again."""

    BUSY = "busy"  # too many bytes wait to be written
    DISK = "disk"  # the disk is not open, has failed too often to be tried now, or is smaller than the block
    BUDGET = "budget"  # the daily limit on written bytes is reached
    FAILED = "failed"  # the write was tried, and failed


class Writes(JobQueue):
    """The queue of jobs that store blocks, first in, first out.

    The blocks of a job are written from last to first, so that the end of a prefix is evicted before its beginning. At
    most *max_queued_bytes* wait to be written. A block that would exceed this limit is refused, unless no other block
    waits. A block that is already on disk is only marked as recently used.
    """

    def __init__(self, index: RowIndex, transfers: TransferEngine, max_queued_bytes: int) -> None:
        super().__init__(transfers, Route.HOST_TO_DISK, index.disk.writing, MAX_IN_FLIGHT)
        self.num_stored = 0  # rows
        self.refused: Counter[Refusal] = Counter()  # rows
        self.queued_bytes = 0  # not written yet
        self._index = index
        self._max_queued_bytes = max_queued_bytes

    def begin(self, job: Job) -> None:
        """Queue writes of the job's blocks that are not on disk yet. Those refused, see `Refusal`, fail immediately."""
        held = [place for place, is_held in enumerate(self._index.are_held(job.rows)) if is_held]
        job.end(held, [True] * len(held))
        self.touch([job.rows[place] for place in held])
        taken: list[int] = []
        is_held = set(held)
        for place, row in enumerate(job.rows):
            if place in is_held:
                continue
            if (refusal := self._refusal(row.memory.nbytes)) is not None:
                self._end(job, [place], refusal)
                continue
            self.queued_bytes += row.memory.nbytes
            taken.append(place)
        self.enqueue(cut(job, taken[::-1], MAX_PART_BYTES, MAX_PART_ROWS))

    def touch(self, rows: Sequence[BlockRow]) -> None:
        """Mark the blocks of these rows as recently used, to delay their eviction.

        Does nothing while rows wait to be written.
        """
        if rows and self._index.disk.is_open and not self.has_queued:
            keys = [self._index.disk.key(row.group_id, row.name) for row in rows]
            self.transfers.submit(Route.HOST_TO_DISK, lambda: self._index.disk.touch(keys), 0, lambda transfer: None)

    def is_usable(self) -> bool:
        return self._index.disk.is_open

    def work_of(self, part: Part) -> Callable[[], Written]:
        disk = self._index.disk

        def key_of(group_id: int, name: BlockName | None) -> bytes:
            return b"" if name is None else disk.key(group_id, name)

        rows = part.rows
        keys = [(key_of(row.group_id, row.name), key_of(row.group_id, row.parent)) for row in rows]

        def write() -> Written:
            return disk.write(
                [
                    Blob(key, digest(row.memory), row.memory, parent)
                    for (key, parent), row in zip(keys, rows, strict=True)
                ]
            )

        return write

    def has_disk_failed(self, transfer: Transfer) -> bool:
        return transfer.error is not None

    def on_finished(self, part: Part, transfer: Transfer) -> None:
        self.queued_bytes -= part.num_bytes
        if transfer.error is None:
            self._index.disk.on_written(transfer.result)
            self._index.on_written([(row.group_id, row.name) for row in part.rows], transfer.result.evicted)
            self.num_stored += len(part.places)
            part.job.end(part.places, [True] * len(part.places))
        else:
            if isinstance(transfer.error, StoreFull):
                self._index.on_written((), transfer.error.evicted)
            self._end(part.job, part.places, Refusal.FAILED)

    def on_given_up(self, part: Part) -> None:
        self.queued_bytes -= part.num_bytes
        self._end(part.job, part.places, Refusal.DISK)

    def _refusal(self, num_bytes: int) -> Refusal | None:
        disk = self._index.disk
        if not disk.may_write() or num_bytes > disk.latest.capacity_bytes:
            return Refusal.DISK
        if self.queued_bytes and self.queued_bytes + num_bytes > self._max_queued_bytes:
            return Refusal.BUSY
        return None if disk.budget.allows(self.queued_bytes + num_bytes) else Refusal.BUDGET

    def _end(self, job: Job, places: Sequence[int], refusal: Refusal) -> None:
        self.refused[refusal] += len(places)
        job.end(places, [False] * len(places))
