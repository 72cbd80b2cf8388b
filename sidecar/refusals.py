"""Refusals: counts of refused requests and connections by kind, with rate-limited log lines."""

import logging
from collections import Counter
from collections.abc import Callable

QUIET_S = 60.0  # minimum time between two log lines about one kind

log = logging.getLogger(__name__)


class Refusals:
    """Counts of refused requests and connections by kind, and a limit on the number of log lines about them.

    For each kind, at most one line is logged in `QUIET_S` seconds. The line says how many refusals there were since the
    last line of the same kind. Owned by the endpoint's thread.
    """

    def __init__(self, clock: Callable[[], float], endpoint: str = "lmcache") -> None:
        """Create counts of 0. *endpoint* is the prefix of the log lines."""
        self._clock = clock
        self._endpoint = endpoint
        self.counts: Counter[str] = Counter()
        self._told: dict[str, int] = {}  # by kind, the count when the last line was logged
        self._told_at: dict[str, float] = {}

    def refused(self, kind: str, what: str) -> None:
        """Count a refusal, and log *what* unless a line of this kind was logged less than `QUIET_S` seconds ago.

        *kind* must be a name from the code, never text from a client, so that the number of counts stays small.
        """
        self.counts[kind] += 1
        now = self._clock()
        if now - self._told_at.get(kind, -QUIET_S) < QUIET_S:
            return
        num_new = self.counts[kind] - self._told.get(kind, 0)
        self._told[kind], self._told_at[kind] = self.counts[kind], now
        log.warning("%s: %s%s", self._endpoint, what, f" ({num_new} times)" if num_new > 1 else "")
