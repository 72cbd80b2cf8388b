"""Refusals: counts of refused requests and connections by kind, with rate-limited log lines."""

import logging
from collections import Counter
from collections.abc import Callable

QUIET_S = 60.0  # minimum time between two log lines about one kind

log = logging.getLogger(__name__)


class Refusals:
    """Counts of refusals by kind, with at most one log line per kind in `QUIET_S`. Owned by the endpoint's thread.

    The next line of a kind says how many refusals there were since the last one.
    """

    def __init__(self, clock: Callable[[], float], endpoint: str = "lmcache") -> None:
        """Start at zero. *endpoint* is the prefix of the log lines."""
        self._clock = clock
        self._endpoint = endpoint
        self.counts: Counter[str] = Counter()
        self._told: dict[str, int] = {}  # by kind, the count at the last line
        self._told_at: dict[str, float] = {}

    def refused(self, kind: str, what: str) -> None:
        """Count a refusal, and log *what* unless a line of this kind was logged less than `QUIET_S` seconds ago.

        The kinds are fixed by the code; a client cannot add any.
        """
        self.counts[kind] += 1
        now = self._clock()
        if now - self._told_at.get(kind, -QUIET_S) < QUIET_S:
            return
        num_new = self.counts[kind] - self._told.get(kind, 0)
        self._told[kind], self._told_at[kind] = self.counts[kind], now
        log.warning("%s: %s%s", self._endpoint, what, f" ({num_new} times)" if num_new > 1 else "")
