"""`Loads`: rows on their way from disk into an engine's memory, verified when they arrive."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.connectors.disk_below.job import Job
from kvtier.connectors.disk_below.row_index import Row, RowIndex
from kvtier.store.record import Fault
from kvtier.tiers.lower.breaker import Attempt
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

MAX_PART_BYTES = 32 << 20  # the store itself reads such a part with several threads
MAX_PART_ROWS = 512


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """The rows of one job that one reader reads together."""

    job: Job
    places: Sequence[int]
    num_bytes: int


class Loads:
    """The load jobs, which are read in the order of their submission.

    Each job is cut into parts, and each part is one request to the store. All parts of a job are begun before any part
    of a later job. At most two parts per reader are in flight, so that a long job fills no queue and keeps few bytes in
    flight.

    A job ends within the store's deadline, which also ends reads that hang. While the disk is not readable, all queued
    parts fail at once. The caller holds the lock of `DiskBelow`.
    """

    def __init__(self, index: RowIndex, transfers: TransferEngine, num_readers: int) -> None:
        self.num_loaded = 0  # rows
        self.num_failed = 0  # requested rows that were missing, corrupt or unreadable
        self._index = index
        self._transfers = transfers
        self._num_readers = num_readers
        self._queued: deque[Part] = deque()
        self._num_under_way = 0  # parts

    def begin(self, job: Job) -> None:
        """Queue a job's rows that are on disk; its other rows fail at once."""
        held = self._index.are_held(job.rows)
        absent = [place for place, is_held in enumerate(held) if not is_held]
        self._end(job, absent, [False] * len(absent))
        self._queued += self._parts(job, [place for place, is_held in enumerate(held) if is_held])
        self.pump()

    def pump(self) -> None:
        """Submit queued parts to free readers."""
        disk = self._index.disk
        while self._queued and self._num_under_way < 2 * self._num_readers:
            attempt = disk.reading.begin() if disk.is_readable else None
            if attempt is None:
                self._give_up()
                return
            part = self._queued[0]
            rows = [part.job.rows[place] for place in part.places]
            keys = [disk.key(row.group_id, row.name) for row in rows]
            memories = [row.memory for row in rows]
            if not self._submit(part, attempt, keys, memories):
                disk.reading.withdraw(attempt)
                if not self._num_under_way:  # the lane is closed
                    self._give_up()
                return
            self._queued.popleft()
            self._num_under_way += 1

    @property
    def num_pending(self) -> int:
        """Number of parts that are queued or in flight."""
        return len(self._queued) + self._num_under_way

    def _submit(self, part: Part, attempt: Attempt, keys: list[bytes], memories: list[memoryview]) -> bool:
        disk = self._index.disk
        return self._transfers.submit(
            Route.DISK_TO_HOST,
            lambda: disk.read(keys, memories),
            part.num_bytes,
            lambda transfer: self._on_read(part, attempt, transfer),
            len(keys),
        )

    def _on_read(self, part: Part, attempt: Attempt, transfer: Transfer) -> None:
        disk = self._index.disk
        outcomes: list[bytes | Fault] = (
            transfer.result if transfer.error is None else [Fault.IO_ERROR] * len(part.places)
        )
        if isinstance(transfer.error, LaneClosed):
            disk.reading.withdraw(attempt)
        elif Fault.IO_ERROR in outcomes:
            disk.reading.on_failed(attempt)
        else:
            disk.reading.on_succeeded(attempt)
        self._num_under_way -= 1
        for place, outcome in zip(part.places, outcomes, strict=True):
            if isinstance(outcome, Fault):
                row = part.job.rows[place]
                self._index.on_read_failed(row.group_id, row.name, outcome)
        self._end(part.job, part.places, [not isinstance(outcome, Fault) for outcome in outcomes])
        self.pump()

    def _give_up(self) -> None:
        """Fail all queued parts, because the disk must not be used now."""
        queued, self._queued = self._queued, deque()
        for part in queued:
            self._end(part.job, part.places, [False] * len(part.places))

    def _end(self, job: Job, places: Sequence[int], is_good: Sequence[bool]) -> None:
        job.end(places, is_good)
        self.num_loaded += sum(is_good)
        self.num_failed += len(places) - sum(is_good)

    def _parts(self, job: Job, places: Sequence[int]) -> list[Part]:
        """Return the rows at *places*, cut into parts for the readers."""
        return [
            Part(job, part, sum(job.rows[place].memory.nbytes for place in part))
            for part in cut(places, job.rows, MAX_PART_BYTES, MAX_PART_ROWS)
        ]


def cut(places: Sequence[int], rows: Sequence[Row], max_bytes: int, max_rows: int) -> list[list[int]]:
    """Return *places* in parts, in order. A part has one row, or at most *max_bytes* and *max_rows*."""
    parts: list[list[int]] = []
    num_bytes = 0
    for place in places:
        size = rows[place].memory.nbytes
        if not parts or num_bytes + size > max_bytes or len(parts[-1]) == max_rows:
            parts.append([])
            num_bytes = 0
        parts[-1].append(place)
        num_bytes += size
    return parts
