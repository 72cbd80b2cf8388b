"""OneCaller: a lock around all calls of an object, which also rejects calls after closing and in a forked process."""

import os
import threading
from collections.abc import Callable
from types import TracebackType


class OneCaller:
    """A lock for an object that several threads share: enter it as a context manager around each call.

    Concurrent calls wait for each other. Entering raises RuntimeError in three cases:

    - The object was closed.
    - The process was forked after the object was created.
    - The same thread is already within a call, for example because a signal handler makes another call.
    """

    def __init__(self, name: str) -> None:
        """Create the lock of an object. Error messages begin with the object's *name*."""
        self._name = name
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._caller: int | None = None  # id of the thread whose call is running
        self._is_closed = False

    @property
    def is_forked(self) -> bool:
        """True if this process was forked after the object was created, so that it lacks the object's threads."""
        return os.getpid() != self._pid

    @property
    def is_over(self) -> bool:
        """True if `check` raises, because the object is closed or this process was forked."""
        return self.is_forked or self._is_closed

    def check(self) -> None:
        """Raise RuntimeError if the object is closed or belongs to another process. Never block."""
        if self.is_forked:
            raise RuntimeError(
                f"{self._name}: this process was forked after process {self._pid} created the object, so the "
                "object's threads do not exist here; create one in this process, or start processes by spawn"
            )
        if self._is_closed:
            raise RuntimeError(f"{self._name}: has been closed; create a new one")

    def close(self, work: Callable[[], None]) -> None:
        """Wait for the running call, make all later calls raise, and call *work*, which closes the object.

        Do nothing if the object is already closed, or if this process was forked.
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
            self.check()  # the object may have been closed meanwhile
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
                f"{self._name}: called from within one of its own calls, for example by a signal handler; call it "
                "again when the running call has returned"
            )
        self._turn.acquire()
        self._caller = threading.get_ident()

    def _end(self) -> None:
        self._caller = None
        self._turn.release()
