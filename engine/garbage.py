"""Garbage: schedules full garbage collections, which stop every thread, for when the engine is idle."""

import gc
import logging
import threading
import time
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

NEVER = 1 << 30
# Numbers of collections of generation 1 since the last full collection; 100 stand for at least 700,000 new objects.
ENOUGH = 100  # then an idle engine runs a full collection
TOO_MANY = 2000  # then a busy engine runs one between two steps, because it must not keep garbage for ever


class Garbage:
    """A context manager for the serving thread, in which full collections run only while the engine is idle.

    A full collection visits all objects, which takes 0.2 s with torch and transformers alone. It skips objects that are
    older than this context (`gc.freeze`). The younger generations are collected as usual. A full collection runs
    between steps only after 14 million new objects without an idle moment.

    The collector belongs to the process, so the last of several engines to end restores the settings that the first
    one found. A disabled collector stays disabled.
    """

    _lock = threading.Lock()
    _num_serving = 0
    _thresholds_before = (0, 0, 0)

    def __enter__(self) -> Self:
        cls = type(self)
        with cls._lock:
            if cls._num_serving == 0:
                cls._thresholds_before = gc.get_threshold()
                gc.set_threshold(*cls._thresholds_before[:2], NEVER)
            cls._num_serving += 1
        if gc.isenabled():
            gc.collect()
            gc.freeze()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        cls = type(self)
        with cls._lock:
            cls._num_serving -= 1
            gc.unfreeze()  # so that this engine's objects can be collected
            if cls._num_serving == 0:
                gc.set_threshold(*cls._thresholds_before)

    def on_idle(self) -> None:
        """Run a full collection if enough garbage has gathered. Call this while the engine is idle."""
        if gc.isenabled() and gc.get_count()[2] >= ENOUGH:
            gc.collect()

    def on_step(self) -> None:
        """Run a full collection if the engine has not been idle for very long. Call this after each step."""
        if gc.isenabled() and gc.get_count()[2] >= TOO_MANY:
            started = time.perf_counter()
            gc.collect()
            took_ms = 1e3 * (time.perf_counter() - started)
            log.info("garbage: the engine is never idle; a full collection between two steps took %.0f ms", took_ms)
