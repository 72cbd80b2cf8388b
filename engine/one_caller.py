"""OneCaller: calls on an object in turn, in the process that made it, until it is closed."""

import os
import threading
from collections.abc import Callable
from types import TracebackType


class OneCaller:
    """A context manager around each call on an object that threads share. Threads wait for each other.

    Raises:
        RuntimeError: In a process that was forked after the object was made, after `close`, and if a call is made
            within another one of the same thread, as a signal handler may do.
    """

    def __init__(self, name: str) -> None:
        """Create the guard of an object that errors call *name*."""
        self._name = name
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._caller: int | None = None  # the thread whose call is under way
        self._is_closed = False

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked after the object was made: its threads and sockets are the parent's."""
        return os.getpid() != self._pid

    @property
    def is_over(self) -> bool:
        """Whether `check` raises."""
        return self.is_forked or self._is_closed

    def check(self) -> None:
        """Raise RuntimeError if the object may not be used here, or not any more; wait for no other call."""
        if self.is_forked:
            raise RuntimeError(
                f"{self._name}: this process was forked after process {self._pid} made it, so its threads are not "
                "here; make it in the process that uses it, or start processes by spawn"
            )
        if self._is_closed:
            raise RuntimeError(f"{self._name}: has been closed; make a new one")

    def close(self, work: Callable[[], None]) -> None:
        """Wait for the call under way, do *work*, and have all later calls raise.

        Does nothing if the object was closed before, and in a forked process.
        """
        if self.is_over:
            return
        self._begin()
        try:
            if not self._is_closed:
                self._is_closed = True
                work()
        finally:
            self._end()

    def __enter__(self) -> None:
        self.check()
        self._begin()
        try:
            self.check()  # it may have been closed meanwhile
        except BaseException:
            self._end()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _begin(self) -> None:
        if self._caller == threading.get_ident():
            raise RuntimeError(
                f"{self._name}: called from within a call of its own, for example by a signal handler; call it after "
                "that call has returned"
            )
        self._turn.acquire()
        self._caller = threading.get_ident()

    def _end(self) -> None:
        self._caller = None
        self._turn.release()
