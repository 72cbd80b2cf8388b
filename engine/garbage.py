"""Garbage: delays Python's full garbage collections, which stop all threads, until the engine is idle."""

import gc
import logging
import threading
import time
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

NEVER = 1 << 30
# Maximum thresholds of generations 0 and 1. A collection of generation 1 then looks at up to 700 new objects, and at
# the items of their lists, for example the 8,192 block names of a long prompt. With thresholds of 700 and 2 it looked
# at 2,800, among them 25 such lists, which took 4 ms. With Python's default thresholds it looks at up to 7,700.
YOUNG = (350, 0)
# Numbers of collections of generation 1 since the last full collection; 1,000 correspond to 700,000 new objects.
ENOUGH = 1000  # then an idle engine runs a full collection
TOO_MANY = 20_000  # then a busy engine runs one between two steps, because it must not keep garbage for ever


class Garbage:
    """A context manager for the engine's thread. It restricts full collections to times when the engine is idle.

    A full collection of all objects takes 0.2 s with torch and transformers alone, so objects that exist at the start
    of the context are left out (`gc.freeze`). The younger generations are collected as usual, but in smaller parts (see
    `YOUNG`). An engine that is never idle runs a full collection between two steps after 14 million new objects.

    All engines of a process share its collector. When the last one ends, the original settings are restored. A disabled
    collector stays disabled.
    """

    _lock = threading.Lock()
    _num_serving = 0
    _thresholds_before = (0, 0, 0)

    def __enter__(self) -> Self:
        cls = type(self)
        with cls._lock:
            if cls._num_serving == 0:
                cls._thresholds_before = gc.get_threshold()
                first, second, _ = cls._thresholds_before
                gc.set_threshold(min(first, YOUNG[0]), min(second, YOUNG[1]), NEVER)
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
        """Run a full collection if too much garbage has gathered since the last one. Call this after each step."""
        if gc.isenabled() and gc.get_count()[2] >= TOO_MANY:
            started = time.perf_counter()
            gc.collect()
            took_ms = 1e3 * (time.perf_counter() - started)
            log.info("garbage: the engine is never idle; a full collection between two steps took %.0f ms", took_ms)
