"""`Job`: rows that are stored or loaded together. `JobQueue`: the parts of jobs on their way to or from the disk."""

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
    """The rows that one call stores or loads. They end in any order; the caller is notified once, after the last."""

    rows: Sequence[BlockRow]
    future: Outcomes = field(default_factory=Future)
    outcomes: list[bool] = field(init=False)
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.outcomes = [False] * len(self.rows)
        self.num_left = len(self.rows)

    @property
    def has_ended(self) -> bool:
        """Whether every row has an outcome."""
        return self.num_left == 0

    def end(self, places: Sequence[int], is_good: Sequence[bool]) -> None:
        """Record whether the rows at *places*, which are indices in `rows`, succeeded. Each row ends once."""
        for place, good in zip(places, is_good, strict=True):
            self.outcomes[place] = good
        self.num_left -= len(places)

    def tell(self) -> None:
        """Set the result of the future, which calls the caller's callbacks with the outcomes."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self.outcomes)


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """The rows of one job that one transfer reads or writes together."""

    job: Job
    places: Sequence[int]
    num_bytes: int

    @property
    def rows(self) -> list[BlockRow]:
        """The rows, in the order of *places*."""
        return [self.job.rows[place] for place in self.places]


def cut(job: Job, places: Sequence[int], max_bytes: int, max_rows: int) -> list[Part]:
    """Split the rows at *places* into parts, in order.

    A part has at most *max_rows* rows, and at most *max_bytes* bytes unless it has only one row.
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
    """The parts of jobs that wait for the lane of one route or are in flight on it, in the order of submission.

    All parts of a job are begun before any part of a later job. If the disk must not be used, all queued parts fail
    immediately. A subclass defines the transfer of a part and processes its outcome. The caller holds the lock of
    `DiskBelow`.
    """

    def __init__(self, transfers: TransferEngine, route: Route, breaker: CircuitBreaker, max_in_flight: int) -> None:
        """Create an empty queue.

        *breaker* decides for each part whether it may be tried. At most *max_in_flight* parts are in flight.
        """
        self.transfers = transfers
        self._route = route
        self._breaker = breaker
        self._max_in_flight = max_in_flight
        self._queued: deque[Part] = deque()
        self._num_in_flight = 0  # parts

    @property
    def has_queued(self) -> bool:
        """Whether any part waits to be submitted."""
        return bool(self._queued)

    def enqueue(self, parts: Iterable[Part]) -> None:
        """Queue the parts, and submit as many queued parts as may be in flight."""
        self._queued += parts
        self._pump()

    @abstractmethod
    def is_usable(self) -> bool:
        """Return whether the disk may be used now. The circuit breaker must allow each attempt as well."""

    @abstractmethod
    def work_of(self, part: Part) -> Callable[[], Any]:
        """Return the callable that transfers a part. It runs on the lane's thread and uses no state of this object."""

    @abstractmethod
    def has_disk_failed(self, transfer: Transfer) -> bool:
        """Return whether the finished transfer of a part counts as a failure of the disk."""

    @abstractmethod
    def on_finished(self, part: Part, transfer: Transfer) -> None:
        """Record the outcomes of a part's rows from its finished transfer."""

    @abstractmethod
    def on_given_up(self, part: Part) -> None:
        """Record that a queued part's rows failed, because the disk must not be used now."""

    def _pump(self) -> None:
        """Submit queued parts, or give all of them up if the disk must not be used now."""
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
