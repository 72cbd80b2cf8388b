"""Guard: the one place where what goes wrong in a hook ends, so that the engine never sees it."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

REST_S = 60.0  # for which an adapter finds and stores nothing after an error that nothing foresaw

T = TypeVar("T")
F = TypeVar("F")


class Guard:
    """Runs hooks one at a time, under *lock*, and gives the fallback for one that fails. It is logged with where it
    came from, once for each kind, and counted; then *give_up* lets go of what can be, and hooks rest for `REST_S`."""

    def __init__(self, give_up: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.RLock()
        self.num_errors = 0
        self._give_up = give_up
        self._clock = clock
        self._rests_until = float("-inf")
        self._logged: set[tuple[str, str]] = set()

    @property
    def is_resting(self) -> bool:
        """Whether hooks find and store nothing for a while."""
        return self._clock() < self._rests_until

    def run(self, hook: Callable[[], T], fallback: F) -> T | F:
        """What the hook gives, or the *fallback* if it fails or rests."""
        if self.is_resting:
            return fallback
        return self.run_always(hook, fallback)

    def run_always(self, hook: Callable[[], T], fallback: F) -> T | F:
        """The same for what has to be done while others rest too: the end of what was begun."""
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
            log.error("kvtier: prefixes are computed for %d s, after an error of its own", REST_S, exc_info=error)
        try:
            self._give_up()
        except Exception:  # it leases what it leases until the process ends
            log.exception("kvtier: what it leases cannot be let go")
