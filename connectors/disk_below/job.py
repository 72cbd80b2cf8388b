"""`Job`: the blocks that one call loads or stores. `JobQueue`: a queue of transfers between memory and disk."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvtier.connectors.disk_below.row_index import BlockRow
from kvtier.tiers.lower.breaker import Attempt, CircuitBreaker
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

Outcomes = Future[list[bool]]
"""A future with a success flag for each row of a job. It never has an error, and kvtier never cancels it."""


@dataclass(eq=False, slots=True)
class Job:
    """The rows (blocks with their memory) that one call loads or stores.

    The rows may be finished in any order. The caller is notified once, after the last row.
    """

    rows: Sequence[BlockRow]
    future: Outcomes = field(default_factory=Future)
    outcomes: list[bool] = field(init=False)
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.outcomes = [False] * len(self.rows)
        self.num_left = len(self.rows)

    @property
    def has_ended(self) -> bool:
        """True if each block of the job has been transferred or has failed."""
        return self.num_left == 0

    def end(self, places: Sequence[int], is_good: Sequence[bool]) -> None:
        """Record for the blocks at the indices *places* whether they succeeded. Call this once for each block."""
        for place, good in zip(places, is_good, strict=True):
            self.outcomes[place] = good
        self.num_left -= len(places)

    def tell(self) -> None:
        """Set the future's result, which runs the caller's callbacks."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self.outcomes)


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """The blocks of a job that are read or written in one transfer. *places* are their indices in the job."""

    job: Job
    places: Sequence[int]
    num_bytes: int

    @property
    def rows(self) -> list[BlockRow]:
        """The blocks of this part and their memory, in the order of *places*."""
        return [self.job.rows[place] for place in self.places]


def cut(job: Job, places: Sequence[int], max_bytes: int, max_rows: int) -> list[Part]:
    """Divide the rows of *job* that have the indices *places* into parts, in this order.

    A part has at most *max_rows* rows and *max_bytes* bytes. A row that is larger than *max_bytes* is a part of its
    own.
    """
    parts: list[list[int]] = []
    num_bytes = 0
    for place in places:
        size = job.rows[place].memory.nbytes
        if not parts or num_bytes + size > max_bytes or len(parts[-1]) == max_rows:
            parts.append([])
            num_bytes = 0
        parts[-1].append(place)
        num_bytes += size
    return [Part(job, part, sum(job.rows[place].memory.nbytes for place in part)) for part in parts]


class JobQueue(ABC):
    """A queue of transfers between memory and disk in one direction, first in, first out.

    Each job is divided into parts, and each part is one transfer. A limited number of parts is in flight, and the other
    parts wait. While the disk cannot be used, waiting parts fail at once. A subclass defines how a part is transferred
    and how its outcome is processed. Callers must hold the lock of `DiskBelow`.
    """

    def __init__(self, transfers: TransferEngine, route: Route, breaker: CircuitBreaker, max_in_flight: int) -> None:
        """Create an empty queue with at most *max_in_flight* transfers in flight.

        *breaker* decides for each transfer whether it may be tried.
        """
        self.transfers = transfers
        self._route = route
        self._breaker = breaker
        self._max_in_flight = max_in_flight
        self._queued: deque[Part] = deque()
        self._num_in_flight = 0  # parts

    @property
    def has_queued(self) -> bool:
        """True if any blocks wait for their transfer to begin."""
        return bool(self._queued)

    def enqueue(self, parts: Iterable[Part]) -> None:
        """Queue the parts, and begin as many transfers as the limit of parts in flight allows."""
        self._queued += parts
        self._pump()

    @abstractmethod
    def is_usable(self) -> bool:
        """Return whether the disk may be used now. If so, the circuit breaker still has to allow each transfer."""

    @abstractmethod
    def work_of(self, part: Part) -> Callable[[], Any]:
        """Return a function that transfers the part. It runs on another thread and must not use this queue's state."""

    @abstractmethod
    def has_disk_failed(self, transfer: Transfer) -> bool:
        """Return whether the finished transfer counts as a failure of the disk."""

    @abstractmethod
    def on_finished(self, part: Part, transfer: Transfer) -> None:
        """Record for each block of *part* whether its *transfer*, which has finished, succeeded."""

    @abstractmethod
    def on_given_up(self, part: Part) -> None:
        """Record that the blocks of *part* failed without a transfer, because the disk cannot be used now."""

    def _pump(self) -> None:
        while self._queued and self._num_in_flight < self._max_in_flight:
            attempt = self._breaker.begin() if self.is_usable() else None
            if attempt is None:
                self._give_up()
                return
            if not self._submit(self._queued[0], attempt):
                self._breaker.withdraw(attempt)
                if not self._num_in_flight:  # the lane is closed
                    self._give_up()
                return
            self._queued.popleft()
            self._num_in_flight += 1

    def _submit(self, part: Part, attempt: Attempt) -> bool:
        return self.transfers.submit(
            self._route,
            self.work_of(part),
            part.num_bytes,
            lambda transfer: self._on_transferred(part, attempt, transfer),
            len(part.places),
        )

    def _on_transferred(self, part: Part, attempt: Attempt, transfer: Transfer) -> None:
        self._num_in_flight -= 1
        if isinstance(transfer.error, LaneClosed):
            self._breaker.withdraw(attempt)
        elif self.has_disk_failed(transfer):
            self._breaker.on_failed(attempt)
        else:
            self._breaker.on_succeeded(attempt)
        self.on_finished(part, transfer)
        self._pump()

    def _give_up(self) -> None:
        queued, self._queued = self._queued, deque()
        for part in queued:
            self.on_given_up(part)
