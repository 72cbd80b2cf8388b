"""Lanes: run copies beside the owner's thread, and hand each back through one queue."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

CLOSE_TIMEOUT_S = 10.0


class LaneClosed(Exception):
    """The transfer was still queued when its lane closed; nothing of it was copied."""


@dataclass(eq=False, slots=True)
class Transfer:
    """One piece of work for a lane and, once finished, its outcome: a `result` or an `error`.

    The owner makes it, the lane runs it and hands it back through the `finished` queue, and the owner calls `deliver`.
    """

    work: Callable[[], Any]
    num_bytes: int
    deliver: Callable[["Transfer"], None]
    result: Any = None
    error: BaseException | None = None
    seconds: float = 0.0  # that the work ran, without *waited_s*
    waited_s: float = 0.0  # that it waited for compute: no time of the lane's
    finished_at: float = 0.0  # monotonic
    num_blocks: int = 0  # that the work moves

    def run(self) -> None:
        """Do the work on the calling thread. The only place where a copy's error is caught."""
        started_at = time.monotonic()
        try:
            self.result = self.work()
        except Exception as error:  # a thread's top: the owner learns of it in poll()
            self.error = error
        finally:
            self.finished_at = time.monotonic()
            self.seconds = max(0.0, self.finished_at - started_at - self.waited_s)


Finished = queue.SimpleQueue[Transfer]


class Lane(Protocol):
    """Runs transfers and puts each that it took into the owner's `Finished` queue exactly once, in any order.

    It is bounded: at its capacity it refuses. It touches no state of its owner.
    """

    def submit(self, transfer: Transfer) -> bool:
        """Take the transfer; False if the lane is full or closed. Waits for nothing."""

    @property
    def num_pending(self) -> int:
        """Transfers that were taken and have not finished."""

    def close(self) -> bool:
        """Finish the running transfers, fail the queued ones with `LaneClosed`, and end the threads. Idempotent.

        False if a running transfer did not finish in `CLOSE_TIMEOUT_S`; its thread is left to the process's end. The
        queued ones come back nevertheless.
        """


class InlineLane:
    """Runs a transfer inside `submit`: for replay and tests, where time must not matter."""

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
        except SystemExit as error:  # a library's ends a copy, as on a thread; Ctrl-C is for the caller, and goes there
            transfer.error = error
        self._finished.put(transfer)
        return True

    def close(self) -> bool:
        self._closed = True
        return True


class ThreadLane:
    """Runs transfers on its own threads, in order of submission (with one thread: strictly in order)."""

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
            self._queue.put(transfer)  # inside the lock: nothing may be queued behind close()'s end marks
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
                except BaseException as error:  # a library's SystemExit ends a copy, never the thread that others need
                    transfer.error = error
            self._hand_back(transfer)

    def _hand_back(self, transfer: Transfer) -> None:
        with self._lock:
            self._num_pending -= 1
        self._finished.put(transfer)

    def _fail_queued(self) -> None:
        """Hand back what is queued as failed: the threads hang, and will not take it."""
        queued: list[Transfer | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                queued.append(self._queue.get_nowait())
        for transfer in queued:
            if transfer is None:
                self._queue.put(None)  # a thread that comes back after all still ends
            else:
                transfer.error = LaneClosed()
                self._hand_back(transfer)
