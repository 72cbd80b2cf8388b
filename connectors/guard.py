"""`Guard`: the error boundary of an adapter's hooks, so that no exception reaches the engine."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

REST_S = 60.0  # how long an adapter finds and stores nothing after an unexpected error

T = TypeVar("T")
F = TypeVar("F")


class Guard:
    """A runner of hooks, one at a time under *lock*, that returns a fallback if a hook fails.

    Errors are counted, and logged with a traceback once for each kind. After an error, *give_up* releases what can be
    released, and hooks rest for `REST_S`.
    """

    def __init__(self, give_up: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.RLock()
        self.num_errors = 0
        self._give_up = give_up
        self._clock = clock
        self._rests_until = float("-inf")
        self._logged: set[tuple[str, str]] = set()

    @property
    def is_resting(self) -> bool:
        """Whether hooks find and store nothing because of a recent error."""
        return self._clock() < self._rests_until

    def run(self, hook: Callable[[], T], fallback: F) -> T | F:
        """Return the result of *hook*, or *fallback* if the hook fails or hooks rest."""
        if self.is_resting:
            return fallback
        return self.run_always(hook, fallback)

    def run_always(self, hook: Callable[[], T], fallback: F) -> T | F:
        """Like `run`, but also run while hooks rest, for hooks that finish earlier work."""
        with self.lock:
            try:
                return hook()
            except Exception as error:  # the engine goes on, whatever this is
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
        except Exception:  # its leases last until the process ends
            log.exception("kvtier: leases cannot be released after an internal error")
