"""Sidecar: owns host memory and disk, and serves engines from them in the loop of one thread."""

import selectors
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from kvtier.engine.observability.records.recent_records import RecentRecords
from kvtier.engine.observability.records.request_log import RequestLog
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.engine.stores.remote_store import OpenRemote
from kvtier.engine.stores.reopening_store import ReopeningStore
from kvtier.sidecar.endpoint import AttachedClient, Endpoint
from kvtier.sidecar.finished_transfers import FinishedTransfers
from kvtier.sidecar.layout import Layout
from kvtier.sidecar.layouts import Layouts
from kvtier.sidecar.pins import Pins
from kvtier.sidecar.statistics import SidecarStatistics, statistics_of
from kvtier.tiers.lower.ssd_life import TERABYTE, SsdLife, SsdLifeStatistics
from kvtier.transfer.segment import Segment
from kvtier.transfer.transfer_engine import TransferEngine

_Answer = TypeVar("_Answer")

TICK_S = 0.05  # longest wait while a transfer is in flight or an endpoint waits, so that deadlines are noticed
IDLE_TICK_S = 0.5  # longest wait otherwise; in each step the loop checks whether the disk has opened or may be retried
MAX_QUESTIONS = 256  # questions that other threads may queue; the queue fills only if the owner's thread is stuck
TAKING_IN_S = 0.001  # time limit per turn for processing finished transfers; the rest waits for the next turn


class DriveLife:
    """A wear estimate for the SSD below a store. Owned by the sidecar's thread.

    Each opening of the store starts a new measurement of the write rate. The estimate uses the bytes written for all
    layouts (models and KV formats) together.
    """

    def __init__(
        self, endurance_bytes: int, store: ReopeningStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._life = SsdLife(endurance_bytes / TERABYTE, clock, store.statistics().written_bytes_total)
        self._opening = 0

    def statistics(self) -> SsdLifeStatistics:
        """Return the used fraction of the SSD's endurance, and the years that are left.

        The years follow from the write rate since the store was opened.
        """
        written_bytes = self._store.statistics().written_bytes_total
        opening = self._store.opening()
        if opening not in (0, self._opening):
            self._opening = opening
            self._life.begin(written_bytes)
        return self._life.statistics(written_bytes)


class QueueFull(RuntimeError):
    """Error of `Sidecar.ask` if `MAX_QUESTIONS` questions are already waiting for the sidecar's thread."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Progress of saving, which writes to disk the chunks that are only in host memory."""

    is_there: bool  # whether there is a disk
    is_possible: bool  # whether there is a disk and writes to it do not fail now
    num_left: int  # chunks that are only in host memory


class Sidecar:
    """The tiers of all layouts (see `Layout`), and the loop that serves engines from them.

    The loop never blocks on a single disk access, engine or copy. A single `select` call waits for the engines'
    sockets and for finished transfers. Created by `build_sidecar`. `stop` may be called from any thread or signal
    handler.
    """

    def __init__(
        self,
        segment: Segment,
        finished: FinishedTransfers,
        transfers: TransferEngine,
        layouts: Layouts,
        endpoints: Sequence[Endpoint],
        store: ReopeningStore | None,
        life: DriveLife | None = None,
        request_log: RequestLog | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        remote: OpenRemote | None = None,
    ) -> None:
        self.layouts = layouts
        self.endpoints = endpoints
        self.pins = Pins(layouts.shares, clock)
        self._segment = segment
        self._finished = finished
        self._transfers = transfers
        self._store = store
        self._life = life
        self._request_log = request_log
        self._tracer = tracer
        self._remote = remote
        self.remote_where = None if remote is None else remote.where
        self._clock = clock
        self.started_at = clock()
        self._is_stopping = False
        self._asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._selector = selectors.DefaultSelector()
        for file in (finished.file, *(endpoint.file for endpoint in endpoints)):
            self._selector.register(file, selectors.EVENT_READ)

    def run(self, look: Callable[[SidecarStatistics], None] = lambda statistics: None) -> None:
        """Serve until `stop` is called, and pass the statistics to *look* about every `IDLE_TICK_S` seconds."""
        look_at = self._clock()
        while not self._is_stopping:
            may_have_more = self.turn()
            if self._clock() >= look_at:
                look(self.statistics())
                look_at = self._clock() + IDLE_TICK_S
            self._wait(may_have_more)

    def turn(self) -> bool:
        """Run one step of the loop; return whether engines may have sent messages for the next step."""
        self._finished.reset()
        until = self._clock() + TAKING_IN_S
        self._transfers.poll(should_continue=lambda: self._clock() < until)
        self._answer_asked()
        self.layouts.poll()
        self.pins.poll()
        for endpoint in self.endpoints:
            endpoint.tick()
        # Receive last: after a send, a socket may hold frames that it reports only when it is polled again.
        return sum(endpoint.receive() for endpoint in self.endpoints) > 0

    def stop(self) -> None:
        """Make `run` return after the current step of its loop."""
        self._is_stopping = True
        self._finished.wake()

    def ask(self, question: Callable[[], _Answer]) -> Future[_Answer]:
        """Run *question* on the thread that owns the tiers, between two steps of its loop.

        May be called from any thread. The returned future fails with `QueueFull` if `MAX_QUESTIONS` questions are
        queued.
        """
        answer: Future[_Answer] = Future()
        if self.num_asked >= MAX_QUESTIONS:
            answer.set_exception(QueueFull(f"{MAX_QUESTIONS} questions are already queued for the sidecar's thread"))
            return answer
        self._asked.put((question, answer))
        self._finished.wake()
        return answer

    @property
    def num_asked(self) -> int:
        """Number of questions queued for the sidecar's thread. Any thread may read this property."""
        return self._asked.qsize()

    @property
    def why_not_ready(self) -> str:
        """Reason why engines cannot attach and store now; empty if they can attach and store."""
        if self._is_stopping:
            return "the sidecar is about to end"
        if not self.endpoints:
            return "no endpoint is open"
        if self._segment.backed_bytes < self.layouts.extents.extent_bytes:
            return "no host memory has been allocated yet"
        return ""

    @property
    def records(self) -> RecentRecords:
        """Recent lookups of engines. Only endpoints that receive the prompts' tokens record them."""
        return self.layouts.records

    def clients(self) -> list[AttachedClient]:
        """Return a snapshot of all attached clients."""
        return [client for endpoint in self.endpoints for client in endpoint.clients()]

    def quarantined(self) -> list[AttachedClient]:
        """Return a snapshot of the clients whose session has ended although one of their processes may still copy."""
        return self.layouts.quarantine.clients()

    def saving(self) -> Saving:
        """Return the progress of saving, which writes to disk the chunks that are only in host memory."""
        is_there = self._store is not None
        return Saving(is_there, is_there and self.layouts.is_saving_possible, self.layouts.num_unsaved)

    def clear(self, layouts: Sequence[Layout]) -> None:
        """Evict every chunk of these layouts, and discard the chunks that engines are storing now."""
        for endpoint in self.endpoints:
            endpoint.on_clear(layouts)
        for tiers in self.layouts:
            if tiers.layout in layouts:
                tiers.clear()

    def check(self, layout: Layout) -> None:
        """Raise AssertionError if the layout's bookkeeping is inconsistent."""
        self.layouts.open(layout).check()

    def check_endpoints(self) -> None:
        """Raise AssertionError if the bookkeeping of an endpoint or of the pins (see `Pins`) is inconsistent."""
        self.pins.check()
        for endpoint in self.endpoints:
            endpoint.check()

    def now(self) -> float:
        """Return the current time, by the clock that also gives clients and leases their timestamps."""
        return self._clock()

    def leave(self) -> None:
        """Keep the segment, which is the shared host memory, for the next sidecar process.

        Engines keep the segment mapped, and may finish the copies that they have in flight.
        """
        self.layouts.ledger.freeze()
        self._segment.leave()

    def flush(self, timeout_s: float, on_turn: Callable[[], None] = lambda: None) -> int:
        """Close the endpoints, and write to disk the chunks that are only in host memory. Return how many are left.

        Stops after *timeout_s*, or when writing fails. Calls *on_turn* after each step of the loop.
        """
        for endpoint in self.endpoints:
            self._selector.unregister(endpoint.file)
            endpoint.close()
        self.endpoints = ()
        give_up_at = self._clock() + timeout_s
        while (num_left := self.layouts.num_unsaved) and self._clock() < give_up_at:
            self.turn()
            on_turn()
            if not self.layouts.is_saving_possible:
                break
            self._wait(False)
        return num_left

    def statistics(self) -> SidecarStatistics:
        """Return a snapshot of all counters and states."""
        store = None if self._store is None else (self._store.standing(), self._store.statistics())
        endpoints = tuple(endpoint.counts() for endpoint in self.endpoints)
        life = None if self._life is None else self._life.statistics()
        request_log = None if self._request_log is None else self._request_log.counts()
        return statistics_of(
            self.layouts, self._segment, self._transfers, store, endpoints, self.pins.statistics(), life, request_log
        )

    def close(self) -> None:
        """Stop the transfer threads, and close the store and the segment (the shared host memory).

        The segment's name is removed, unless `leave` was called. Chunks that are only in host memory are lost, unless
        `flush` has written them to disk before.
        """
        for endpoint in self.endpoints:
            endpoint.close()
        self._selector.close()
        if self._store is not None:
            self._store.stop_opening()
        is_closed = self._transfers.close()
        if self._remote is not None:
            self._remote.close()
        if self._store is not None:
            self._store.close() if is_closed else self._store.kill()
        if self._request_log is not None:
            self._request_log.close()
        self.layouts.close()
        if self._tracer is not None:
            self._tracer.close()
        self._segment.close()  # after the store, whose process has the segment's descriptor
        if is_closed:
            self._finished.close()

    def _answer_asked(self) -> None:
        while not self._asked.empty():
            question, answer = self._asked.get()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question())
                except Exception as error:  # for the caller of `ask` to handle
                    answer.set_exception(error)

    def _wait(self, may_have_more: bool) -> None:
        """Wait until a socket is readable, a transfer has finished, or a deadline may have passed."""
        if may_have_more or not self._finished.empty():
            return
        is_busy = self._transfers.in_flight or any(endpoint.is_waiting for endpoint in self.endpoints)
        self._selector.select(TICK_S if is_busy else IDLE_TICK_S)
