"""Lanes, which are queues of transfers (such as copies of blocks) with threads, and the measurement of their speed."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

CLOSE_TIMEOUT_S = 10.0
_MEMORY_S = 0.5  # half-life of a measurement, in seconds of copying
_MIN_S = 1e-6


class LaneClosed(Exception):
    """The error of a transfer that was not started, because its lane was closed."""


@dataclass(eq=False, slots=True)
class Transfer:
    """A unit of work for a lane, such as a copy of blocks. A finished transfer has a `result` or an `error`.

    The thread that owns the lane submits the transfer. The lane runs it and puts it into the `Finished` queue. The
    owner takes it from there and calls `deliver`.
    """

    work: Callable[[], Any]
    num_bytes: int
    deliver: Callable[["Transfer"], None]
    result: Any = None
    error: BaseException | None = None
    seconds: float = 0.0  # run time of the work, without *waited_s*
    waited_s: float = 0.0  # time that the work waited for compute, which is not the lane's time
    finished_at: float = 0.0  # monotonic
    num_blocks: int = 0  # blocks that the work moves

    def run(self) -> None:
        """Run the work on the calling thread and store its result or its exception."""
        started_at = time.monotonic()
        try:
            self.result = self.work()
        except Exception as error:  # last handler of the lane's thread; poll() delivers the error to the owner
            self.error = error
        finally:
            self.finished_at = time.monotonic()
            self.seconds = max(0.0, self.finished_at - started_at - self.waited_s)


Finished = queue.SimpleQueue[Transfer]


class Lane(Protocol):
    """A bounded queue of transfers, and threads that run them without touching the submitting thread's state.

    The lane puts each accepted transfer into its `Finished` queue exactly once, in any order.
    """

    def submit(self, transfer: Transfer) -> bool:
        """Accept the transfer without blocking; return False if the lane is full or closed."""

    @property
    def num_pending(self) -> int:
        """Number of accepted transfers that are queued or running."""

    def close(self) -> bool:
        """Finish the running transfers, fail the queued ones with `LaneClosed`, and end the threads. Idempotent.

        Returns False if a running transfer does not finish within `CLOSE_TIMEOUT_S`. Its thread then goes on. The
        queued transfers are put into the `Finished` queue in either case.
        """


class InlineLane:
    """A lane (queue of transfers) without threads, for tests and benchmarks: `submit` runs the transfer itself."""

    def __init__(self, finished: Finished) -> None:
        self._finished = finished
        self._closed = False

    @property
    def num_pending(self) -> int:
        return 0

    def submit(self, transfer: Transfer) -> bool:
        if self._closed:
            return False
        try:
            transfer.run()
        except SystemExit as error:  # raised by a library: it fails the copy, as on a thread; Ctrl-C reaches the caller
            transfer.error = error
        self._finished.put(transfer)
        return True

    def close(self) -> bool:
        self._closed = True
        return True


class ThreadLane:
    """A lane that starts transfers in the order of submission, on its own threads.

    With one thread, the transfers also finish in this order.
    """

    def __init__(self, finished: Finished, name: str, num_threads: int = 1, capacity: int = 64) -> None:
        self._finished = finished
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._capacity = capacity
        self._num_pending = 0
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"kvtier-{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def submit(self, transfer: Transfer) -> bool:
        with self._lock:
            if self._closed or self._num_pending >= self._capacity:
                return False
            self._num_pending += 1
            self._queue.put(transfer)  # inside the lock: no transfer may be queued after the None that close() puts
        return True

    def close(self) -> bool:
        with self._lock:
            self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        give_up_at = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        has_ended = not any(thread.is_alive() for thread in self._threads)
        if not has_ended:
            self._fail_queued()
        return has_ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        while (transfer := self._queue.get()) is not None:
            if self._closed:
                transfer.error = LaneClosed()
            else:
                try:
                    transfer.run()
                except BaseException as error:  # a library's SystemExit fails the copy and must not end the thread
                    transfer.error = error
            self._hand_back(transfer)

    def _hand_back(self, transfer: Transfer) -> None:
        with self._lock:
            self._num_pending -= 1
        self._finished.put(transfer)

    def _fail_queued(self) -> None:
        queued: list[Transfer | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                queued.append(self._queue.get_nowait())
        for transfer in queued:
            if transfer is None:
                self._queue.put(None)  # a thread that stops hanging must still end
            else:
                transfer.error = LaneClosed()
                self._hand_back(transfer)


class LaneSpeed:
    """The recent speed of one queue of transfers (`Lane`), measured from finished transfers. Not thread-safe.

    It is the speed of all threads of the queue together. Idle time, failed transfers and transfers of 0 bytes do not
    count.
    """

    def __init__(self) -> None:
        self._num_bytes = 0.0
        self._seconds = 0.0
        self._until = float("-inf")  # monotonic time up to which the lane's time has been counted
        self.latency_s = 0.0  # time to the first byte; 0 if it was not measured

    @property
    def measured_at(self) -> float:
        """Monotonic time at which the last measured transfer finished."""
        return self._until

    @property
    def bytes_per_s(self) -> float | None:
        """Recent speed, weighted towards newer transfers; None before the first transfer."""
        return self._num_bytes / max(self._seconds, _MIN_S) if self._num_bytes else None

    def update_from(self, transfer: Transfer) -> None:
        """Update the measured copy speed with a finished transfer. Call this in the order in which transfers finish."""
        if transfer.error is not None or not transfer.num_bytes:
            return
        started_at = max(self._until, transfer.finished_at - transfer.seconds)
        seconds = max(0.0, transfer.finished_at - started_at)
        fading = 0.5 ** (seconds / _MEMORY_S)
        self._num_bytes = self._num_bytes * fading + transfer.num_bytes
        self._seconds = self._seconds * fading + seconds
        self._until = max(self._until, transfer.finished_at)

    def update_latency(self, seconds: float) -> None:
        """Update `latency_s` with the duration of a request that transferred no blocks, such as a lookup."""
        self.latency_s = 0.8 * self.latency_s + 0.2 * seconds if self.latency_s else seconds

    def take_over(self, bytes_per_s: float, measured_at: float) -> None:
        """Replace the measured speed by one that another process measured at the monotonic time *measured_at*."""
        self._num_bytes, self._seconds, self._until = bytes_per_s, 1.0, measured_at
