"""EngineThread: the thread that loads, steps and closes an engine, even if callers are cancelled."""

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvtier.engine.core import FLUSH_TIMEOUT_S, EngineCore
from kvtier.engine.garbage import Garbage
from kvtier.engine.loaded_engine import LoadedEngine
from kvtier.engine.scheduling.request import Request
from kvtier.engine.thread_work import coroutine_safe

log = logging.getLogger(__name__)

IDLE_S = 0.1  # how often an engine without requests polls its tiers
COPYING_S = 0.005  # how often it does so while copies are in flight
EXIT_WAIT_S = FLUSH_TIMEOUT_S + 60.0  # how long a program that ends waits for the engine to close
LOADING_EXIT_WAIT_S = 10.0  # how long it waits for an engine that is still loading and has nothing to flush yet

Progress = Callable[[int], None]
_T = TypeVar("_T")


def promise() -> "Future[Any]":
    """Return a future that its waiters cannot cancel. Only its creator sets its result."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def fail(future: "Future[_T]", error: BaseException) -> None:
    """Set the future's exception.

    An error that must not be raised in a coroutine, such as CancelledError, is replaced by a RuntimeError.
    """
    future.set_exception(coroutine_safe(error))


@dataclass(frozen=True, slots=True)
class _Command:
    do: Callable[[EngineCore], None]
    refuse: Callable[[str], None]


class Attendant(Protocol):
    """A task that the engine's thread runs between steps. Only this thread calls its methods."""

    def tick(self) -> None:
        """Do a part of this task's work. Called after every step, and about every 0.1 s while the engine is idle."""

    def end(self) -> None:
        """Release everything in the engine that this object holds, such as pinned blocks. Called once, at the end."""


class EngineThread:
    """A daemon thread that loads an engine, steps it, runs commands between the steps, and finally closes it.

    The thread completes three futures in this order, even after an error. `loaded` gets the engine, or an
    error if loading failed. `served` is done when no more commands run; it gets an error if the engine failed. `closed`
    gets an error if closing failed. Each command that is passed to `put` either runs or is refused. Any thread may call
    all methods except `add_attendant` and `remove_attendant`.

    ThreadPoolExecutor is not used, because Python waits at exit until the threads of a pool have ended. A program that
    forgot to close the engine would never end.
    """

    def __init__(
        self,
        load: Callable[[], LoadedEngine],
        on_advanced: Callable[[Request], None],
        on_ended: Callable[[str], None],
    ) -> None:
        """Create the thread without starting it. All three callbacks run in the thread.

        Args:
            load: Loads the engine.
            on_advanced: Called with each request that got a token in a step.
            on_ended: Called once with the reason, when the engine runs no more steps or when loading has failed.
        """
        self.loaded: Future[LoadedEngine] = promise()
        self.served: Future[None] = promise()
        self.closed: Future[None] = promise()
        self._load = load
        self._on_advanced = on_advanced
        self._on_ended = on_ended
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._attendants: list[Attendant] = []  # owned by the thread
        self._lock = threading.Lock()  # guards the attributes below
        self._pid: int | None = None  # of the process that started the thread
        self._has_begun = False
        self._is_ending = False
        self._why_over: str | None = None
        self._progress: Progress = lambda num_left: None

    @property
    def is_forked(self) -> bool:
        """True if this process was forked from the one that started the thread, and so does not have the thread."""
        return self._pid is not None and os.getpid() != self._pid

    @property
    def has_begun(self) -> bool:
        """True if the thread was started. The thread will complete the futures `loaded`, `served` and `closed`."""
        return self._has_begun

    def start(self) -> None:
        """Start the thread, which loads the engine. Raise RuntimeError if it was started or ended before."""
        with self._lock:
            if self._has_begun or self._is_ending:
                raise RuntimeError("this AsyncLLM was already started or closed; create a new one")
            self._has_begun = True
        self._pid = os.getpid()
        threading.Thread(target=self._live, name="kvtier-engine", daemon=True).start()

    def put(self, do: Callable[[EngineCore], None], refuse: Callable[[str], None] = lambda why: None) -> None:
        """Run *do* in the thread, between two steps. If the engine ends first, call *refuse* with the reason."""
        with self._lock:
            why = self._why_over
            if why is None:
                self._commands.put(_Command(do, refuse))
        if why is not None:
            refuse(why)

    def add_attendant(self, attendant: Attendant) -> None:
        """Add a task that runs between steps from now on. Only the engine's thread may call this."""
        self._attendants.append(attendant)

    def remove_attendant(self, attendant: Attendant) -> None:
        """Remove a task that `add_attendant` added, and call its `end`. Only the engine's thread may call this."""
        self._attendants.remove(attendant)
        attendant.end()

    def end(self, progress: Progress | None = None) -> None:
        """Tell the thread to close the engine, after loading it and running the queued commands. Return at once.

        While the engine closes, the thread calls *progress* with the number of blocks left to write. A later call of
        `end` only replaces *progress*.
        """
        with self._lock:
            if progress is not None:
                self._progress = progress
            if not self._is_ending:
                self._is_ending = True
                self._commands.put(None)

    def end_at_exit(self) -> None:
        """End the thread. Wait up to `LOADING_EXIT_WAIT_S` for it to load, then up to `EXIT_WAIT_S` for it to close."""
        if self.is_forked:
            return
        self.end()
        if not wait([self.loaded], LOADING_EXIT_WAIT_S).done:
            log.warning("the program ends while the engine is still loading")
        elif not wait([self.closed], EXIT_WAIT_S).done:
            log.warning("the engine did not close in %.0f s; blocks that it had not written are lost", EXIT_WAIT_S)

    def _live(self) -> None:
        try:
            engine = self._load()
        except BaseException as error:  # top of the thread: the future carries the error to the caller
            self._end_commands("AsyncLLM: could not be started")
            fail(self.loaded, error)
            self.served.set_result(None)
            self.closed.set_result(None)
            return
        with Garbage() as garbage:  # entered before *loaded* is completed, because this stops all threads briefly
            self.loaded.set_result(engine)
            try:
                self._serve(engine.core, garbage)
            except BaseException as error:
                log.error("the engine failed", exc_info=error)
                self._end_commands(f"the engine failed: {error}")
                fail(self.served, error)
            else:
                self._end_commands("AsyncLLM: was closed before this call was carried out; start a new one")
                self.served.set_result(None)

        try:
            engine.close(self._tell_progress)
        except BaseException as error:
            fail(self.closed, error)
        else:
            self.closed.set_result(None)

    def _serve(self, core: EngineCore, garbage: Garbage) -> None:
        while self._carry_out(core):
            if core.has_work:
                for request in core.step():
                    self._on_advanced(request)
                garbage.on_step()
            else:
                core.idle()
                garbage.on_idle()
            for attendant in self._attendants:
                attendant.tick()

    def _carry_out(self, core: EngineCore) -> bool:
        """Run the queued commands; an idle engine waits briefly for one. Return False if the thread should end."""
        waits = not core.has_work
        while True:
            try:
                timeout_s = COPYING_S if core.cache.num_in_flight else IDLE_S
                command = self._commands.get(block=waits, timeout=timeout_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            command.do(core)
            waits = False  # wait only for the first command, so that a busy caller cannot keep the engine from its work

    def _tell_progress(self, num_left: int) -> None:
        self._progress(num_left)  # looked up on each call, because `end` may replace it while the engine closes

    def _end_commands(self, why: str) -> None:
        with self._lock:  # from here on `put` refuses
            self._why_over = why
        self._on_ended(why)
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.refuse(why)
