"""Garbage: has full garbage collections, which stop every thread, happen while the engine has no request."""

import gc
import logging
import threading
import time
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

NEVER = 1 << 30
ENOUGH = 100  # collections of younger objects, 700,000 new ones at least: worth a full one when idle …
TOO_MANY = 2000  # … and beside requests: an engine that is never idle must not keep garbage for ever


class Garbage:
    """A context manager for the thread that serves: meanwhile full collections happen when the engine is idle.

    A full collection walks through all objects: 0.2 s with torch and transformers alone. Objects that are older than
    this context are left out of it (`gc.freeze`), younger ones are collected as always, and all together when the
    engine is idle. Beside requests that happens only after 14 million new objects without an idle moment.

    The collector is the process's: the last of several engines to end leaves it as the first found it. A collector that
    is switched off stays so.
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
            gc.unfreeze()  # what this engine leaves can be found again
            if cls._num_serving == 0:
                gc.set_threshold(*cls._thresholds_before)

    def on_idle(self) -> None:
        """The engine has nothing to do: collect all garbage, if enough has gathered."""
        if gc.isenabled() and gc.get_count()[2] >= ENOUGH:
            gc.collect()

    def on_step(self) -> None:
        """A step has ended, and another may follow at once: collect only if there was no idle moment for very long."""
        if gc.isenabled() and gc.get_count()[2] >= TOO_MANY:
            started = time.perf_counter()
            gc.collect()
            took_ms = 1e3 * (time.perf_counter() - started)
            log.info("garbage: the engine is never idle; a full collection between two steps took %.0f ms", took_ms)
