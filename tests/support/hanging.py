"""Lanes some of whose copies never come back, and a clock that every wait moves."""

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from chaos import FakeClock, World

from kvtier.transfer.lane import CLOSE_TIMEOUT_S, Finished, LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route


class WaitedQueue(queue.SimpleQueue[Transfer]):
    """The lanes' outcomes. To wait for one is to let the lanes work; it takes none of our time."""

    def __init__(self, let_time_pass: Callable[[float], None]) -> None:
        super().__init__()
        self._let_time_pass = let_time_pass

    def get(self, block: bool = True, timeout: float | None = None) -> Transfer:
        assert timeout is not None, "a wait without an end"
        if self.empty():
            self._let_time_pass(timeout)
        return super().get_nowait()


@dataclass(eq=False)
class HangingLane:
    """Threads that begin what is submitted in order and finish it in `work`. Those of *hangs*, counted from 0 as they
    are submitted, never come back, and neither does their thread; without a thread left nothing does."""

    finished: Finished
    clock: FakeClock
    num_threads: int
    hangs: frozenset[int] = frozenset()
    capacity: int = 64
    num_submitted: int = 0
    queued: list[tuple[int, Transfer]] = field(default_factory=list)
    stuck: list[Transfer] = field(default_factory=list)
    stuck_at: float | None = None

    @property
    def num_pending(self) -> int:
        return len(self.queued) + len(self.stuck)

    def submit(self, transfer: Transfer) -> bool:
        if self.num_pending >= self.capacity:
            return False
        self.queued.append((self.num_submitted, transfer))
        self.num_submitted += 1
        return True

    def work(self) -> bool:
        """Finish all that the threads can; whether that was anything."""
        begun, self.queued = self.queued, []
        num_finished = 0
        while begun and len(self.stuck) < self.num_threads:
            number, transfer = begun.pop(0)
            if number in self.hangs:
                self.stuck.append(transfer)
                self.stuck_at = self.clock.now
            else:
                transfer.run()
                self.finished.put(transfer)
                num_finished += 1
        self.queued = begun + self.queued
        return num_finished > 0

    def come_back(self) -> None:
        """What hung has ended after all."""
        self.hangs, stuck, self.stuck = frozenset(), self.stuck, []
        for transfer in stuck:
            transfer.run()
            self.finished.put(transfer)

    def close(self) -> bool:
        queued, self.queued = self.queued, []
        for _, transfer in queued:
            transfer.error = LaneClosed()
            self.finished.put(transfer)
        if self.stuck:
            self.clock.now += CLOSE_TIMEOUT_S
        return not self.stuck


LANES = (Route.DEVICE_TO_HOST, Route.HOST_TO_DEVICE, Route.HOST_TO_DISK, Route.DISK_TO_HOST)


@dataclass(frozen=True)
class Fault:
    """The transfer of this number on this route never comes back; the route's lane has so many threads."""

    route: Route
    number: int
    num_threads: int


class HangingWorld(World):
    """A world in which one copy at most never comes back, and in which waiting is what lets the others."""

    fault: Fault | None = None  # set before `__init__`

    def open_lanes(self, failing: float) -> None:
        self.finished = WaitedQueue(self.let_time_pass)
        self.lanes: Mapping[Route, HangingLane] = {route: self._lane(route) for route in LANES}

    def wait_for_index(self) -> None:
        for _ in range(20):  # as an engine does that starts: it may never be known
            self.clock.now += 1
            self.settle()

    def let_time_pass(self, seconds: float) -> None:
        """The lanes finish what they can."""
        self.clock.now += seconds
        for lane in self.lanes.values():
            lane.work()

    def settle(self) -> None:
        while sum(lane.work() for lane in self.lanes.values()):  # not any(): each is to work
            self.cache.poll()
        self.cache.poll()

    def come_back(self) -> None:
        """What hung has ended after all, and all that waited behind it."""
        for lane in self.lanes.values():
            lane.come_back()
        self.settle()

    def _lane(self, route: Route) -> HangingLane:
        if self.fault is None or self.fault.route is not route:
            return HangingLane(self.finished, self.clock, num_threads=2)
        return HangingLane(self.finished, self.clock, self.fault.num_threads, frozenset([self.fault.number]))
