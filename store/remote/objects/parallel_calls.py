"""`ParallelCalls`: calls that wait for a network, beside each other, with a deadline and an end."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvtier.store.remote_store import RemoteUnavailable

T = TypeVar("T")


class ParallelCalls:
    """Runs calls in threads. Who waits for them waits until its deadline, or until `close`, and no longer.

    A call that has begun cannot be stopped: it must end by a timeout of its own.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kvtier-remote")
        self._waiting: set[_Countdown] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def check_open(self) -> None:
        """Raise `RemoteUnavailable` if it is closed."""
        if self._is_closed:
            raise RemoteUnavailable("the store is closed")

    def run(self, calls: Sequence[Callable[[], T]], timeout_s: float) -> list[T | RemoteUnavailable]:
        """For each call what it gives, or why there is nothing. Another error than `RemoteUnavailable` is raised."""
        countdown = _Countdown(len(calls))
        with self._lock:
            self.check_open()
            self._waiting.add(countdown)
            futures = [self._pool.submit(call) for call in calls]
        for future in futures:
            future.add_done_callback(countdown.one_done)
        countdown.wait(timeout_s)
        with self._lock:
            self._waiting.discard(countdown)
        for future in futures:
            future.cancel()
        self.check_open()
        results: list[T | RemoteUnavailable] = []
        for future in futures:
            results.append(_failure_of(future) or future.result())
        return results

    def close(self) -> None:
        """End the waiting; calls that have begun end by themselves. It may be called again."""
        with self._lock:
            self._is_closed = True
            for countdown in self._waiting:
                countdown.end()
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Countdown:
    """Ends when so many futures are done."""

    def __init__(self, num_left: int) -> None:
        self._num_left = num_left
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        if not num_left:
            self.end()

    def one_done(self, _: Future[T]) -> None:
        with self._lock:
            self._num_left -= 1
            if self._num_left == 0:
                self.end()

    def end(self) -> None:
        self._is_over.set()

    def wait(self, timeout_s: float) -> None:
        self._is_over.wait(timeout_s)


def _failure_of(future: Future[T]) -> RemoteUnavailable | None:
    """Why there is no result; None if there is one, or an error that is to be raised."""
    if future.cancelled() or not future.done():
        return RemoteUnavailable("no answer in time")
    error = future.exception()
    return error if isinstance(error, RemoteUnavailable) else None
