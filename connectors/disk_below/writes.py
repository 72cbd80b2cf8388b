"""`Writes`: rows on their way from an engine's memory to disk."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier.connectors.disk_below.job import Job
from kvtier.connectors.disk_below.loads import cut
from kvtier.connectors.disk_below.row_index import Row, RowIndex
from kvtier.store.blob_store import Blob, StoreFull
from kvtier.store.record import digest
from kvtier.tiers.lower.breaker import Attempt
from kvtier.tiers.lower.disk_tier import Written
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

MAX_BATCH_BYTES = 16 << 20
MAX_BATCH_ROWS = 64
MAX_IN_FLIGHT = 2  # batches: one is written and one waits for the writer


class Refusal(StrEnum):
    """The reason why a row was not stored. The row may be offered again."""

    BUSY = "busy"  # too many bytes wait to be written
    DISK = "disk"  # the disk is not open, or has failed too often to be tried now
    BUDGET = "budget"  # the daily limit on written bytes is reached
    FAILED = "failed"  # the write was tried, and failed


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """The rows of one job that are written together."""

    job: Job
    places: Sequence[int]
    num_bytes: int


class Writes:
    """The store jobs, which are written in the order of their submission.

    The last rows of a job are written first, so that a prefix is evicted from its end. At most *max_queued_bytes* wait.
    Rows beyond that are refused, except that one row is always accepted when none waits. A row that is on disk is not
    written again, but counts as used. The caller holds the lock of `DiskBelow`.
    """

    def __init__(self, index: RowIndex, transfers: TransferEngine, max_queued_bytes: int) -> None:
        self.num_stored = 0  # rows
        self.refused: Counter[Refusal] = Counter()  # rows
        self.queued_bytes = 0  # not written yet
        self._index = index
        self._transfers = transfers
        self._max_queued_bytes = max_queued_bytes
        self._queued: deque[Batch] = deque()
        self._num_under_way = 0

    def begin(self, job: Job) -> None:
        """Queue a job's rows that are not on disk yet; refused rows fail at once."""
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
        for places in cut(taken[::-1], job.rows, MAX_BATCH_BYTES, MAX_BATCH_ROWS):
            self._queued.append(Batch(job, places, sum(job.rows[place].memory.nbytes for place in places)))
        self.pump()

    def touch(self, rows: Sequence[Row]) -> None:
        """Mark these rows as just used, so that they are evicted later. Does nothing if the writer is busy."""
        if rows and self._index.disk.is_open and not self._queued:
            keys = [self._index.disk.key(row.group_id, row.name) for row in rows]
            self._transfers.submit(Route.HOST_TO_DISK, lambda: self._index.disk.touch(keys), 0, lambda transfer: None)

    def pump(self) -> None:
        """Submit queued batches to the writer."""
        while self._queued and self._num_under_way < MAX_IN_FLIGHT:
            disk = self._index.disk
            attempt = disk.writing.begin() if disk.is_open else None
            batch = self._queued[0]
            if attempt is None or not self._submit(batch, attempt):
                if attempt is not None:
                    disk.writing.withdraw(attempt)
                if attempt is None or not self._num_under_way:
                    self._give_up()
                return
            self._queued.popleft()
            self._num_under_way += 1

    @property
    def num_pending(self) -> int:
        """Number of batches that are queued or in flight."""
        return len(self._queued) + self._num_under_way

    def _refusal(self, num_bytes: int) -> Refusal | None:
        """Return why a row of *num_bytes* is refused now, or None if it is accepted."""
        disk = self._index.disk
        if not disk.may_write() or num_bytes > disk.latest.capacity_bytes:
            return Refusal.DISK
        if self.queued_bytes and self.queued_bytes + num_bytes > self._max_queued_bytes:
            return Refusal.BUSY
        return None if disk.budget.allows(self.queued_bytes + num_bytes) else Refusal.BUDGET

    def _submit(self, batch: Batch, attempt: Attempt) -> bool:
        return self._transfers.submit(
            Route.HOST_TO_DISK,
            self._work([batch.job.rows[place] for place in batch.places]),
            batch.num_bytes,
            lambda transfer: self._on_written(batch, attempt, transfer),
            len(batch.places),
        )

    def _work(self, rows: Sequence[Row]) -> Callable[[], Written]:
        """Return the writer's work for a batch, which uses memory and values but no state of this object."""
        disk = self._index.disk

        def key_of(group_id: int, name: BlockName | None) -> bytes:
            return b"" if name is None else disk.key(group_id, name)

        keys = [(key_of(row.group_id, row.name), key_of(row.group_id, row.parent)) for row in rows]

        def write() -> Written:
            return disk.write(
                [
                    Blob(key, digest(row.memory), row.memory, parent)
                    for (key, parent), row in zip(keys, rows, strict=True)
                ]
            )

        return write

    def _on_written(self, batch: Batch, attempt: Attempt, transfer: Transfer) -> None:
        disk = self._index.disk
        self._num_under_way -= 1
        self.queued_bytes -= batch.num_bytes
        if transfer.error is None:
            disk.writing.on_succeeded(attempt)
            disk.on_written(transfer.result)
            blocks = [(batch.job.rows[place].group_id, batch.job.rows[place].name) for place in batch.places]
            self._index.on_written(blocks, transfer.result.evicted)
            self.num_stored += len(batch.places)
            batch.job.end(batch.places, [True] * len(batch.places))
        else:
            if isinstance(transfer.error, LaneClosed):
                disk.writing.withdraw(attempt)
            else:
                disk.writing.on_failed(attempt)
            if isinstance(transfer.error, StoreFull):
                self._index.on_written((), transfer.error.evicted)
            self._end(batch.job, batch.places, Refusal.FAILED)
        self.pump()

    def _give_up(self) -> None:
        """Refuse all queued batches, because the disk must not be used now."""
        queued, self._queued = self._queued, deque()
        for batch in queued:
            self.queued_bytes -= batch.num_bytes
            self._end(batch.job, batch.places, Refusal.DISK)

    def _end(self, job: Job, places: Sequence[int], refusal: Refusal) -> None:
        self.refused[refusal] += len(places)
        job.end(places, [False] * len(places))
