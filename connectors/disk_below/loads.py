"""`Loads`: a queue of blocks to read from disk into an engine's memory."""

from collections.abc import Callable, Sequence

from kvtier.connectors.disk_below.job import Job, JobQueue, Part, cut
from kvtier.connectors.disk_below.row_index import RowIndex
from kvtier.store.record import Fault
from kvtier.transfer.lane import Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

MAX_PART_BYTES = 32 << 20  # the store reads one part with several threads
MAX_PART_ROWS = 512


class Loads(JobQueue):
    """The queue of load jobs, first in, first out. Loaded bytes are verified.

    Each part of a job is one request to the store. At most two parts per reader thread are in flight, to limit the
    bytes in flight. Every job ends, because the store's read timeout also ends reads that hang.
    """

    def __init__(self, index: RowIndex, transfers: TransferEngine, num_readers: int) -> None:
        super().__init__(transfers, Route.DISK_TO_HOST, index.disk.reading, 2 * num_readers)
        self.num_loaded = 0  # rows
        self.num_failed = 0  # requested rows that were missing, corrupt or unreadable
        self._index = index

    def begin(self, job: Job) -> None:
        """Queue reads of the job's blocks. Blocks that are not on disk fail immediately."""
        held = self._index.are_held(job.rows)
        absent = [place for place, is_held in enumerate(held) if not is_held]
        self._end(job, absent, [False] * len(absent))
        there = [place for place, is_held in enumerate(held) if is_held]
        self.enqueue(cut(job, there, MAX_PART_BYTES, MAX_PART_ROWS))

    def is_usable(self) -> bool:
        return self._index.disk.reading.is_closed

    def work_of(self, part: Part) -> Callable[[], list[bytes | Fault]]:
        disk = self._index.disk
        keys = [disk.key(row.group_id, row.name) for row in part.rows]
        memories = [row.memory for row in part.rows]
        return lambda: disk.read(keys, memories)

    def has_disk_failed(self, transfer: Transfer) -> bool:
        if transfer.error is not None:
            return True
        outcomes: list[bytes | Fault] = transfer.result
        return Fault.IO_ERROR in outcomes

    def on_finished(self, part: Part, transfer: Transfer) -> None:
        outcomes: list[bytes | Fault] = (
            transfer.result if transfer.error is None else [Fault.IO_ERROR] * len(part.places)
        )
        for row, outcome in zip(part.rows, outcomes, strict=True):
            if isinstance(outcome, Fault):
                self._index.on_read_failed(row.group_id, row.name, outcome)
        self._end(part.job, part.places, [not isinstance(outcome, Fault) for outcome in outcomes])

    def on_given_up(self, part: Part) -> None:
        self._end(part.job, part.places, [False] * len(part.places))

    def _end(self, job: Job, places: Sequence[int], is_good: Sequence[bool]) -> None:
        job.end(places, is_good)
        self.num_loaded += sum(is_good)
        self.num_failed += len(places) - sum(is_good)
