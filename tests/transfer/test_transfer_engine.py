"""TransferEngine: outcomes come back to the owner in poll, every route is measured, nothing is lost at the end."""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from waiting import DEADLINE_S, is_in, wait_for

from kvtier.transfer import lane as lane_module
from kvtier.transfer.lane import Finished, InlineLane, LaneClosed, ThreadLane, Transfer
from kvtier.transfer.transfer_engine import CopyCounts, Route, RouteStatistics, TransferEngine

UP, DOWN = Route.HOST_TO_DEVICE, Route.DEVICE_TO_HOST


class Owner:
    """Keeps what was delivered to it, and on which thread."""

    def __init__(self) -> None:
        self.delivered: list[Transfer] = []
        self.threads: set[threading.Thread] = set()

    def deliver(self, transfer: Transfer) -> None:
        self.delivered.append(transfer)
        self.threads.add(threading.current_thread())

    @property
    def outcomes(self) -> list[object]:
        return [transfer.result if transfer.error is None else type(transfer.error) for transfer in self.delivered]


def fail() -> None:
    raise OSError("disk on fire")


def inline_engine() -> TransferEngine:
    finished: Finished = queue.SimpleQueue()
    return TransferEngine({route: InlineLane(finished) for route in Route}, finished)


def threaded_engine(capacity: int = 8) -> TransferEngine:
    finished: Finished = queue.SimpleQueue()
    return TransferEngine({route: ThreadLane(finished, route, 1, capacity) for route in Route}, finished)


def poll_until(engine: TransferEngine, num_delivered: int) -> None:
    while num_delivered > 0:
        num_now = engine.poll(timeout_s=DEADLINE_S)
        assert num_now, "what was submitted does not come back"
        num_delivered -= num_now
    assert num_delivered == 0


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def engine(gate: threading.Event) -> Iterator[TransferEngine]:
    engine = threaded_engine()
    yield engine
    gate.set()
    engine.close()


def blocked_by(gate: threading.Event, begun: threading.Event | None = None) -> Callable[[], str]:
    """Work that waits for the *gate*; *begun* is set when it does."""

    def work() -> str:
        if begun is not None:
            begun.set()
        assert gate.wait(DEADLINE_S), "the gate was never opened"
        return "through"

    return work


# --- delivery


def test_nothing_is_delivered_before_poll(owner: Owner) -> None:
    engine = inline_engine()

    engine.submit(UP, lambda: "done", 1, owner.deliver)

    assert owner.delivered == []
    assert engine.in_flight == 1


def test_poll_delivers_everything_that_has_finished(owner: Owner) -> None:
    engine = inline_engine()
    for number, route in enumerate([*Route, *Route]):
        engine.submit(route, lambda number=number: number, 1, owner.deliver)

    num_delivered = engine.poll()

    assert num_delivered == 2 * len(Route)
    assert owner.outcomes == list(range(2 * len(Route)))
    assert engine.in_flight == 0
    assert engine.poll() == 0


def test_an_error_is_delivered_and_not_raised(owner: Owner) -> None:
    engine = inline_engine()
    engine.submit(UP, fail, 1, owner.deliver)
    engine.submit(UP, lambda: "fine", 1, owner.deliver)

    engine.poll()

    assert owner.outcomes == [OSError, "fine"]


def test_delivery_happens_on_the_owner_s_thread(engine: TransferEngine, owner: Owner) -> None:
    for route in Route:
        engine.submit(route, int, 1, owner.deliver)

    poll_until(engine, len(Route))

    assert owner.threads == {threading.current_thread()}


def test_a_delivery_may_submit_the_next_transfer(owner: Owner) -> None:
    engine = inline_engine()

    def go_on(transfer: Transfer) -> None:
        owner.deliver(transfer)
        engine.submit(UP, lambda: "up", 1, owner.deliver)

    engine.submit(Route.DISK_TO_HOST, lambda: "host", 1, go_on)
    while engine.in_flight:
        engine.poll()

    assert owner.outcomes == ["host", "up"]


def test_every_transfer_is_delivered_to_its_own_receiver(engine: TransferEngine) -> None:
    owners = [Owner() for _ in Route]
    for number, route in enumerate(Route):
        engine.submit(route, lambda number=number: number, 1, owners[number].deliver)

    poll_until(engine, len(Route))

    assert [owner.outcomes for owner in owners] == [[number] for number in range(len(Route))]


# --- waiting


def test_poll_without_a_timeout_does_not_wait(engine: TransferEngine, owner: Owner, gate: threading.Event) -> None:
    engine.submit(UP, blocked_by(gate), 1, owner.deliver)

    num_delivered = engine.poll()  # would wait for the gate until its deadline if it waited

    assert num_delivered == 0
    assert engine.in_flight == 1


def test_poll_returns_as_soon_as_something_has_finished(
    engine: TransferEngine, owner: Owner, gate: threading.Event
) -> None:
    engine.submit(UP, blocked_by(gate), 1, owner.deliver)
    engine.submit(DOWN, lambda: "down", 1, owner.deliver)

    num_delivered = engine.poll(timeout_s=10 * DEADLINE_S)  # the gate opens by itself before that, and fails

    assert num_delivered == 1
    assert owner.outcomes == ["down"]
    assert engine.in_flight == 1


class NotedQueue(queue.SimpleQueue[Transfer]):
    """A queue in which no outcome ever is; it notes for how long the engine waits."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float | None] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Transfer:
        self.timeouts.append(timeout)
        raise queue.Empty


class TakingLane(InlineLane):
    """Takes a transfer and never finishes it."""

    def submit(self, transfer: Transfer) -> bool:
        return True


def test_poll_waits_no_longer_than_its_timeout(owner: Owner) -> None:
    finished = NotedQueue()
    engine = TransferEngine({route: TakingLane(finished) for route in Route}, finished)
    engine.submit(UP, int, 1, owner.deliver)

    num_delivered = engine.poll(timeout_s=0.05)

    assert num_delivered == 0
    assert finished.timeouts == [0.05]


def test_poll_does_not_wait_when_nothing_is_under_way() -> None:
    finished = NotedQueue()
    engine = TransferEngine({route: TakingLane(finished) for route in Route}, finished)

    assert engine.poll(timeout_s=DEADLINE_S) == 0

    assert finished.timeouts == []


# --- counting


def test_in_flight_counts_all_routes_until_delivery(
    engine: TransferEngine, owner: Owner, gate: threading.Event
) -> None:
    counts = [engine.in_flight]
    for route in (UP, UP, DOWN):
        engine.submit(route, blocked_by(gate), 1, owner.deliver)
        counts.append(engine.in_flight)

    gate.set()
    poll_until(engine, 3)

    assert counts == [0, 1, 2, 3]
    assert engine.in_flight == 0


def test_pending_is_counted_by_route(engine: TransferEngine, owner: Owner, gate: threading.Event) -> None:
    for route in (UP, UP, DOWN):
        engine.submit(route, blocked_by(gate), 1, owner.deliver)

    pending = {route: engine.num_pending(route) for route in Route}

    assert pending == dict.fromkeys(Route, 0) | {DOWN: 1, UP: 2}


def test_bytes_are_pending_until_delivery_whatever_becomes_of_them(
    engine: TransferEngine, owner: Owner, gate: threading.Event
) -> None:
    engine.submit(UP, blocked_by(gate), 100, owner.deliver)
    engine.submit(UP, fail, 20, owner.deliver)
    engine.submit(DOWN, int, 3, owner.deliver)
    before = engine.pending_bytes(UP), engine.pending_bytes(DOWN)

    gate.set()
    poll_until(engine, 3)

    assert before == (120, 3)
    assert (engine.pending_bytes(UP), engine.pending_bytes(DOWN)) == (0, 0)


def test_a_refused_transfer_has_no_bytes_pending(owner: Owner, gate: threading.Event) -> None:
    engine = threaded_engine(capacity=1)

    for _ in range(2):
        engine.submit(UP, blocked_by(gate), 100, owner.deliver)

    assert engine.pending_bytes(UP) == 100
    gate.set()
    poll_until(engine, 1)
    engine.close()


def test_a_full_route_refuses_and_the_others_do_not(owner: Owner, gate: threading.Event) -> None:
    engine = threaded_engine(capacity=2)

    taken = [engine.submit(UP, blocked_by(gate), 1, owner.deliver) for _ in range(3)]
    taken_down = engine.submit(DOWN, int, 1, owner.deliver)

    assert taken == [True, True, False]
    assert taken_down
    assert engine.in_flight == 3
    gate.set()
    poll_until(engine, 3)
    engine.close()
    assert engine.statistics()[UP].num_transfers == 2


def test_a_slow_route_does_not_hold_up_the_others(engine: TransferEngine, owner: Owner, gate: threading.Event) -> None:
    engine.submit(DOWN, blocked_by(gate), 1, owner.deliver)
    others = [route for route in Route if route is not DOWN]
    for route in others:
        engine.submit(route, lambda route=route: route, 1, owner.deliver)

    poll_until(engine, len(others))

    assert set(owner.outcomes) == set(Route) - {DOWN}


# --- measuring


def test_routes_are_measured_apart(monkeypatch: pytest.MonkeyPatch, owner: Owner) -> None:
    monkeypatch.setattr(lane_module, "time", SimpleNamespace(monotonic=itertools.count(0.0, 2.0).__next__))
    engine = inline_engine()
    for route, work, num_bytes in [(UP, int, 100), (UP, int, 50), (UP, fail, 7), (DOWN, int, 3)]:
        engine.submit(route, work, num_bytes, owner.deliver)

    engine.poll()

    assert engine.statistics() == dict.fromkeys(Route, RouteStatistics()) | {
        DOWN: RouteStatistics(1, num_bytes=3, seconds=2.0, bytes_per_s=1.5),
        UP: RouteStatistics(3, 150, 6.0, num_failed=1, bytes_per_s=pytest.approx(26.5, rel=0.01)),
    }


def test_copies_and_their_blocks_are_counted_apart_from_transfers_that_move_none(owner: Owner) -> None:
    engine = inline_engine()
    for work, num_blocks in [(int, 3), (int, 0), (fail, 5), (fail, 0)]:
        engine.submit(UP, work, 1, owner.deliver, num_blocks)
    before = engine.statistics()[UP].copies

    engine.poll()

    assert before == CopyCounts(num_submitted=2, num_submitted_blocks=8)
    assert engine.statistics()[UP].copies == CopyCounts(
        num_submitted=2, num_done=1, num_failed=1, num_submitted_blocks=8, num_done_blocks=3
    )


def test_a_transfer_is_counted_when_its_receiver_hears_of_it() -> None:
    engine = inline_engine()
    counted: list[int] = []

    engine.submit(UP, int, 1, lambda transfer: counted.append(engine.statistics()[UP].num_transfers))
    counted.append(engine.statistics()[UP].num_transfers)
    engine.poll()

    assert counted == [0, 1]


def test_statistics_are_values_that_stay_as_they_were(owner: Owner) -> None:
    engine = inline_engine()
    before = engine.statistics()

    engine.submit(UP, int, 1, owner.deliver)
    engine.poll()

    assert before[UP] == RouteStatistics()


# --- the end


def test_close_delivers_what_was_queued_as_failed(owner: Owner) -> None:
    engine = threaded_engine()
    running, closing = threading.Event(), threading.get_ident()

    def run_until_closing() -> str:
        running.set()
        wait_for(lambda: is_in(closing, ThreadLane.close))
        wait_for(lambda: is_in(closing, threading.Thread.join))
        return "finished"

    engine.submit(UP, run_until_closing, 10, owner.deliver)
    assert running.wait(DEADLINE_S)
    for _ in range(3):
        engine.submit(UP, lambda: "never", 10, owner.deliver)

    engine.close()

    assert owner.outcomes == ["finished", LaneClosed, LaneClosed, LaneClosed]
    assert engine.in_flight == 0
    assert (engine.statistics()[UP].num_failed, engine.statistics()[UP].num_bytes) == (3, 10)


def test_close_tells_that_one_of_the_lanes_hangs(
    engine: TransferEngine, owner: Owner, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "CLOSE_TIMEOUT_S", 0.1)
    begun = threading.Event()
    engine.submit(UP, blocked_by(gate, begun), 1, owner.deliver)
    assert begun.wait(DEADLINE_S)  # a copy that never began does not hang

    assert not engine.close()

    gate.set()
    poll_until(engine, 1)
    monkeypatch.setattr(lane_module, "CLOSE_TIMEOUT_S", DEADLINE_S)
    assert engine.close()


def test_close_delivers_what_had_finished(owner: Owner) -> None:
    engine = inline_engine()
    engine.submit(UP, lambda: "done", 1, owner.deliver)

    engine.close()

    assert owner.outcomes == ["done"]


def test_close_ends_all_threads_and_may_be_called_twice() -> None:
    before = set(threading.enumerate())
    engine = threaded_engine()

    engine.close()
    engine.close()

    assert set(threading.enumerate()) <= before


def test_a_closed_engine_refuses(owner: Owner) -> None:
    engine = threaded_engine()
    engine.close()

    assert engine.submit(UP, int, 1, owner.deliver) is False
    assert engine.in_flight == 0
