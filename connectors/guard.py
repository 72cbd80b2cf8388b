"""`Guard`: calls the hooks of an adapter and catches all exceptions, so that none reaches the engine."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

REST_S = 60.0  # how long an adapter loads and stores nothing after an unexpected error

T = TypeVar("T")
F = TypeVar("F")


class Guard:
    """A wrapper that calls an adapter's hooks. If a hook raises, the engine gets a fallback value instead.

    Hooks run one at a time, under `lock`. Errors are counted, and the first error of each kind is logged with a
    traceback. After an error the guard rests for `REST_S` seconds: `run` returns fallbacks without calling hooks.
    """

    def __init__(self, give_up: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Create a guard. If a hook raises, it calls *give_up*, which must release all blocks that the hooks leased."""
        self.lock = threading.RLock()
        self.num_errors = 0
        self._give_up = give_up
        self._clock = clock
        self._rests_until = float("-inf")
        self._logged: set[tuple[str, str]] = set()

    @property
    def is_resting(self) -> bool:
        """True if `run` returns only fallbacks now, because a hook failed in the last `REST_S` seconds."""
        return self._clock() < self._rests_until

    def run(self, hook: Callable[[], T], fallback: F) -> T | F:
        """Return the result of *hook*, or *fallback* if it raises or a hook raised in the last `REST_S` seconds."""
        if self.is_resting:
            return fallback
        return self.run_always(hook, fallback)

    def run_always(self, hook: Callable[[], T], fallback: F) -> T | F:
        """Return the result of *hook*, or *fallback* if it raises. Use this for hooks that finish earlier work.

        Unlike `run`, this calls *hook* even if a hook raised in the last `REST_S` seconds.
        """
        with self.lock:
            try:
                return hook()
            except Exception as error:  # no exception may reach the engine
                self._on_error(error)
                return fallback

    def _on_error(self, error: Exception) -> None:
        self.num_errors += 1
        self._rests_until = self._clock() + REST_S
        kind = (type(error).__name__, str(error))
        if kind not in self._logged:
            self._logged.add(kind)
            log.error("kvtier: internal error; nothing is loaded or stored for %d s", REST_S, exc_info=error)
        try:
            self._give_up()
        except Exception:  # the hooks' leases then last until the process ends
            log.exception("kvtier: leases cannot be released after an internal error")
