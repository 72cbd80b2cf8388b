"""`ParallelCalls`: a pool of threads for network calls, whose user waits only until a deadline."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvtier.store.remote_store import RemoteUnavailable

T = TypeVar("T")


class ParallelCalls:
    """A pool of threads that runs network calls in parallel.

    The user of the pool waits for the results only until a deadline or until `close`. A call that has begun cannot be
    stopped, so each call must have a timeout of its own.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kvtier-remote")
        self._waiting: set[_Countdown] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def check_open(self) -> None:
        """Raise `RemoteUnavailable` if the pool is closed."""
        if self._is_closed:
            raise RemoteUnavailable("the store is closed")

    def run(self, calls: Sequence[Callable[[], T]], timeout_s: float) -> list[T | RemoteUnavailable]:
        """Run *calls* in parallel. Return for each call its result, or a `RemoteUnavailable` that says why it failed.

        A call also fails if it does not end within *timeout_s*. Other errors of the calls are raised.
        """
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
        """End the waiting: each `run` in progress raises `RemoteUnavailable`. A second call does nothing.

        Calls that have begun end by themselves.
        """
        with self._lock:
            self._is_closed = True
            for countdown in self._waiting:
                countdown.end()
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Countdown:
    """An event that is set once *num_left* futures are done."""

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
    """Return the error if *future* raised `RemoteUnavailable` or has not ended, else None."""
    if future.cancelled() or not future.done():
        return RemoteUnavailable("no answer in time")
    error = future.exception()
    return error if isinstance(error, RemoteUnavailable) else None
