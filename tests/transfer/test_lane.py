"""Lanes: the contract that all of them keep, and what each kind adds."""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_devices import CUDA_KINDS, GPU_0, CudaDevice, CudaKind
from waiting import DEADLINE_S, is_in, join, wait_for

from kvtier.transfer import lane as lane_module
from kvtier.transfer.cuda.lane import CudaLane
from kvtier.transfer.lane import Finished, InlineLane, Lane, LaneClosed, ThreadLane, Transfer


@dataclass(frozen=True)
class LaneCase:
    """Opens a kind of lane with a capacity."""

    open: Callable[[Finished, int], Lane]
    num_threads: int
    cuda: CudaKind | None = None


INLINE = pytest.param(LaneCase(lambda finished, capacity: InlineLane(finished), 0), id="inline")
QUEUED = [
    pytest.param(
        LaneCase(lambda finished, capacity: ThreadLane(finished, "test", 1, capacity), 1),
        id="thread",
    ),
    pytest.param(
        LaneCase(lambda finished, capacity: ThreadLane(finished, "test", 3, capacity), 3),
        id="3threads",
    ),
]
ON_CUDA = [
    pytest.param(
        LaneCase(
            lambda finished, capacity, n=num_threads: CudaLane(finished, "test", GPU_0, capacity, num_threads=n),
            num_threads,
            kind,
        ),
        id=f"{kind.name}-{num_threads}",
        marks=kind.marks(),
    )
    for kind in CUDA_KINDS
    for num_threads in (1, 3)
]
every_lane = pytest.mark.parametrize("case", [INLINE, *QUEUED, *ON_CUDA], indirect=True)
every_queued_lane = pytest.mark.parametrize("case", [*QUEUED, *ON_CUDA], indirect=True)
every_one_thread_lane = pytest.mark.parametrize("case", [INLINE, QUEUED[0], *ON_CUDA[::2]], indirect=True)


class Gate:
    """Work that says when it has begun and then waits until it is let through."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.open = threading.Event()

    def work(self) -> str:
        self.begun.release()
        assert self.open.wait(DEADLINE_S), "the gate was never opened"
        return "through"

    def wait_until_begun(self, num_transfers: int) -> None:
        for _ in range(num_transfers):
            assert self.begun.acquire(timeout=DEADLINE_S), "a transfer never began"


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Iterator[LaneCase]:
    case: LaneCase = request.param
    with nullcontext() if case.cuda is None else case.cuda.opened():
        yield case


@pytest.fixture
def finished() -> Finished:
    return queue.SimpleQueue()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


@pytest.fixture
def lane(case: LaneCase, finished: Finished, gate: Gate) -> Iterator[Lane]:
    lane = case.open(finished, 8)
    yield lane
    gate.open.set()
    close(lane)


def transfer(work: Callable[[], Any]) -> Transfer:
    return Transfer(work, num_bytes=1, deliver=lambda finished: None)


def take(finished: Finished, num_transfers: int) -> list[Transfer]:
    return [finished.get(timeout=DEADLINE_S) for _ in range(num_transfers)]


def close(lane: Lane) -> None:
    """Close the lane; fails if that hangs."""
    closer = threading.Thread(target=lane.close, name="close", daemon=True)
    closer.start()
    join(closer)


def fail() -> None:
    raise OSError("disk on fire")


def end_the_thread() -> None:
    raise SystemExit(1)


# --- the contract


@every_lane
def test_every_transfer_comes_back_exactly_once(case: LaneCase, finished: Finished) -> None:
    lane = case.open(finished, 1000)
    transfers = [transfer(lambda number=number: number) for number in range(500)]

    taken = [lane.submit(each) for each in transfers]
    back = take(finished, 500)
    close(lane)

    assert all(taken)
    assert finished.empty()
    assert sorted(map(id, back)) == sorted(map(id, transfers))
    assert [each.result for each in transfers] == list(range(500))


@every_lane
def test_an_error_comes_back_with_its_transfer(lane: Lane, finished: Finished) -> None:
    lane.submit(transfer(fail))

    [back] = take(finished, 1)

    assert isinstance(back.error, OSError)
    assert str(back.error) == "disk on fire"
    assert back.result is None


@every_lane
def test_a_lane_goes_on_after_an_error(lane: Lane, finished: Finished) -> None:
    for _ in range(4):  # more than any lane here has threads
        lane.submit(transfer(fail))
    lane.submit(transfer(lambda: "fine"))

    back = take(finished, 5)

    assert sorted(str(each.error or each.result) for each in back) == ["disk on fire"] * 4 + ["fine"]


@every_lane
def test_a_lane_outlives_work_that_wants_to_end_the_thread(case: LaneCase, lane: Lane, finished: Finished) -> None:
    ends = [transfer(end_the_thread) for _ in range(max(1, 2 * case.num_threads))]
    after = transfer(lambda: "done")
    for each in [*ends, after]:
        assert lane.submit(each)

    assert sorted(map(id, take(finished, len(ends) + 1))) == sorted(map(id, [*ends, after]))
    assert [type(each.error) for each in ends] == [SystemExit] * len(ends)
    assert (after.result, after.error) == ("done", None)
    assert lane.num_pending == 0


@every_lane
def test_nothing_is_pending_when_all_have_come_back(lane: Lane, finished: Finished) -> None:
    for work in (fail, int, fail, int):
        lane.submit(transfer(work))

    take(finished, 4)

    assert lane.num_pending == 0


@every_lane
def test_close_may_be_called_twice(case: LaneCase, finished: Finished) -> None:
    lane = case.open(finished, 8)
    lane.submit(transfer(int))

    close(lane)
    close(lane)

    assert len(take(finished, 1)) == 1
    assert finished.empty()


@every_lane
def test_no_thread_is_left_after_close(case: LaneCase, finished: Finished) -> None:
    before = set(threading.enumerate())
    lane = case.open(finished, 8)
    num_more = len(set(threading.enumerate()) - before)

    close(lane)

    assert num_more == case.num_threads
    assert set(threading.enumerate()) <= before


@every_lane
def test_a_closed_lane_refuses(lane: Lane, finished: Finished) -> None:
    num_runs: list[int] = []
    close(lane)

    taken = lane.submit(transfer(lambda: num_runs.append(1)))

    assert taken is False
    assert not num_runs
    assert lane.num_pending == 0
    assert finished.empty()


@every_one_thread_lane
def test_one_thread_keeps_the_order_of_submission(case: LaneCase, finished: Finished) -> None:
    lane = case.open(finished, 1000)
    order: list[int] = []

    for number in range(300):
        lane.submit(transfer(lambda number=number: order.append(number) or number))
    back = take(finished, 300)
    close(lane)

    assert order == list(range(300))
    assert [each.result for each in back] == list(range(300))


# --- lanes with a queue


@every_queued_lane
def test_a_full_lane_refuses_at_once_and_takes_again_when_it_has_room(
    lane: Lane, finished: Finished, gate: Gate
) -> None:
    taken = [lane.submit(transfer(gate.work)) for _ in range(8)]

    refused = lane.submit(transfer(gate.work))  # would wait for the gate for ever if it waited

    gate.open.set()
    take(finished, 8)
    assert taken == [True] * 8
    assert refused is False
    assert lane.submit(transfer(int)) is True
    assert take(finished, 1)[0].error is None


@every_queued_lane
def test_running_and_queued_transfers_are_pending(lane: Lane, finished: Finished, gate: Gate) -> None:
    pending = [lane.num_pending]
    for _ in range(5):
        lane.submit(transfer(gate.work))
        pending.append(lane.num_pending)

    gate.open.set()
    take(finished, 5)

    assert pending == [0, 1, 2, 3, 4, 5]
    assert lane.num_pending == 0


@every_queued_lane
def test_a_refused_transfer_is_not_pending_and_does_not_come_back(lane: Lane, finished: Finished, gate: Gate) -> None:
    for _ in range(8):
        lane.submit(transfer(gate.work))
    num_runs: list[int] = []

    lane.submit(transfer(lambda: num_runs.append(1)))

    assert lane.num_pending == 8
    gate.open.set()
    take(finished, 8)
    close(lane)
    assert finished.empty()
    assert not num_runs


@every_queued_lane
def test_close_finishes_what_runs_and_fails_what_is_queued(
    case: LaneCase, lane: Lane, finished: Finished, gate: Gate
) -> None:
    running = [transfer(gate.work) for _ in range(case.num_threads)]
    num_runs: list[int] = []
    queued = [transfer(lambda: num_runs.append(1)) for _ in range(4)]
    for each in running:
        lane.submit(each)
    gate.wait_until_begun(case.num_threads)
    for each in queued:
        lane.submit(each)

    closing = threading.Thread(target=lane.close)
    closing.start()
    wait_for(lambda: is_in(closing.ident or 0, threading.Thread.join))  # for those at work
    gate.open.set()
    join(closing)

    assert [(each.result, each.error) for each in running] == [("through", None)] * case.num_threads
    assert [type(each.error) for each in queued] == [LaneClosed] * 4
    assert not num_runs
    assert lane.num_pending == 0
    assert sorted(map(id, take(finished, case.num_threads + 4))) == sorted(map(id, running + queued))
    assert finished.empty()


@every_queued_lane
def test_what_is_queued_behind_a_copy_that_hangs_comes_back_at_close(
    case: LaneCase, lane: Lane, finished: Finished, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "CLOSE_TIMEOUT_S", 0.0)
    hanging = [transfer(gate.work) for _ in range(case.num_threads)]
    queued = [transfer(lambda: "never") for _ in range(3)]
    for each in hanging:
        lane.submit(each)
    gate.wait_until_begun(case.num_threads)
    for each in queued:
        lane.submit(each)

    closed = lane.close()

    assert not closed
    assert sorted(map(id, take(finished, 3))) == sorted(map(id, queued))
    assert [type(each.error) for each in queued] == [LaneClosed] * 3
    assert lane.num_pending == case.num_threads
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-test-")]
    gate.open.set()
    assert sorted(map(id, take(finished, case.num_threads))) == sorted(map(id, hanging))
    join(*threads)


@every_queued_lane
def test_the_work_runs_on_the_lane_s_own_threads(lane: Lane, finished: Finished) -> None:
    for _ in range(8):
        lane.submit(transfer(threading.current_thread))

    workers = {each.result for each in take(finished, 8)}

    assert all(worker.name.startswith("kvtier-test-") and worker.daemon for worker in workers)


# --- one kind of lane


def test_three_threads_run_three_transfers_at_once(finished: Finished) -> None:
    together = threading.Barrier(3)
    with ThreadLane(finished, "test", num_threads=3) as lane:
        for _ in range(3):
            lane.submit(transfer(lambda: together.wait(DEADLINE_S)))

        back = take(finished, 3)

    assert sorted(each.result for each in back) == [0, 1, 2]


def test_leaving_the_block_closes_a_thread_lane(finished: Finished) -> None:
    before = set(threading.enumerate())

    with pytest.raises(RuntimeError, match="owner's own"), ThreadLane(finished, "test"):
        raise RuntimeError("owner's own")

    assert set(threading.enumerate()) <= before


def test_an_inline_lane_has_finished_when_submit_returns(finished: Finished) -> None:
    lane = InlineLane(finished)

    lane.submit(transfer(threading.current_thread))

    assert finished.get_nowait().result is threading.current_thread()
    assert lane.num_pending == 0


@pytest.mark.parametrize("work", [int, fail])
def test_a_transfer_knows_how_long_its_work_ran(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any]) -> None:
    monkeypatch.setattr(lane_module, "time", SimpleNamespace(monotonic=itertools.count(10.0, 2.5).__next__))
    timed = transfer(work)

    timed.run()

    assert timed.seconds == 2.5


# --- a lane on a CUDA stream, against kernels that take long enough to be overtaken


class CudaBench:
    """A block on the GPU, pinned host memory, and kernels that have run once, so that no launch waits for loading."""

    def __init__(self, cuda: CudaDevice) -> None:
        self.cuda = cuda
        self.block = torch.zeros(1 << 20, dtype=torch.uint8, device=GPU_0)
        self.seen = torch.zeros_like(self.block)
        self.host = torch.zeros(1 << 20, dtype=torch.uint8, pin_memory=True)
        torch.cuda._sleep(1000)
        self.seen.copy_(self.block)
        self.block.copy_(self.host, non_blocking=True)
        self.host.copy_(self.block, non_blocking=True)
        self.block.fill_(0)
        torch.cuda.synchronize(GPU_0)

    def delay(self) -> None:
        """Keep the caller's current stream busy."""
        self.cuda.delay()

    def take(self, finished: Finished) -> list[Transfer]:
        """The next transfer that comes back; the device works meanwhile."""
        with self.cuda.time_passes():
            return take(finished, 1)


@pytest.fixture
def bench(cuda: CudaDevice) -> CudaBench:
    return CudaBench(cuda)


@pytest.fixture
def cuda_lane(cuda: CudaDevice, finished: Finished) -> Iterator[CudaLane]:
    lane = CudaLane(finished, "test", GPU_0)
    yield lane
    with cuda.time_passes():
        close(lane)


def test_a_copy_down_reads_what_compute_wrote_before_it(
    cuda_lane: CudaLane, finished: Finished, bench: CudaBench
) -> None:
    bench.delay()
    bench.block.fill_(7)
    cuda_lane.submit(transfer(lambda: bench.host.copy_(bench.block, non_blocking=True)))

    [back] = bench.take(finished)

    assert back.error is None
    assert bool((bench.host == 7).all())


def test_a_copy_up_waits_for_compute_that_still_reads_the_slot(
    cuda_lane: CudaLane, finished: Finished, bench: CudaBench
) -> None:
    bench.block.fill_(1)
    bench.host.fill_(9)
    torch.cuda.synchronize(GPU_0)
    bench.delay()
    bench.seen.copy_(bench.block)
    cuda_lane.submit(transfer(lambda: bench.block.copy_(bench.host, non_blocking=True)))

    [back] = bench.take(finished)

    torch.cuda.synchronize(GPU_0)
    assert back.error is None
    assert bool((bench.seen == 1).all())
    assert bool((bench.block == 9).all())


def test_compute_on_a_stream_of_its_own_is_waited_for_too(
    cuda_lane: CudaLane, finished: Finished, bench: CudaBench
) -> None:
    with torch.cuda.stream(torch.cuda.Stream(GPU_0)):
        bench.delay()
        bench.block.fill_(7)
        cuda_lane.submit(transfer(lambda: bench.host.copy_(bench.block, non_blocking=True)))

    bench.take(finished)

    assert bool((bench.host == 7).all())


def test_a_copy_has_landed_when_its_transfer_comes_back(
    cuda_lane: CudaLane, finished: Finished, bench: CudaBench
) -> None:
    bench.block.fill_(7)

    def slow_copy() -> None:
        bench.delay()  # on the lane's stream
        bench.host.copy_(bench.block, non_blocking=True)

    cuda_lane.submit(transfer(slow_copy))

    bench.take(finished)

    assert bool((bench.host == 7).all())


def test_a_copy_that_failed_half_way_has_left_its_slots_alone_when_it_comes_back(
    cuda_lane: CudaLane, finished: Finished, bench: CudaBench
) -> None:
    copied = torch.cuda.Event()

    def fail_half_way() -> None:
        bench.delay()  # on the lane's stream
        bench.block.copy_(bench.host, non_blocking=True)
        copied.record()
        raise OSError("second half")

    cuda_lane.submit(transfer(fail_half_way))

    [back] = bench.take(finished)

    assert isinstance(back.error, OSError)
    assert copied.query(), "the slots are released while the copy still writes them"


def test_submit_does_not_wait_for_compute(cuda_lane: CudaLane, finished: Finished, bench: CudaBench) -> None:
    bench.delay()
    computed = torch.cuda.Event()
    computed.record()

    cuda_lane.submit(transfer(lambda: bench.host.copy_(bench.block, non_blocking=True)))

    assert not computed.query()
    bench.take(finished)


def test_what_a_copy_waited_for_compute_is_no_time_of_the_lane_s(
    cuda_lane: CudaLane, finished: Finished, bench: CudaBench
) -> None:
    """If it were, the load planner would take the bus for slow."""
    bench.delay()
    cuda_lane.submit(transfer(lambda: bench.host.copy_(bench.block, non_blocking=True)))

    [back] = bench.take(finished)

    assert back.waited_s > 0.02
    assert back.seconds < back.waited_s / 2


def test_what_a_transfer_waited_for_others_does_not_count_as_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(100.0, 5.0)
    monkeypatch.setattr(lane_module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    held_up, quick = transfer(lambda: None), transfer(lambda: None)
    held_up.waited_s = 4.0

    held_up.run()
    quick.run()

    assert (held_up.seconds, held_up.finished_at, quick.seconds) == (1.0, 105.0, 5.0)
