"""Refusals: what was refused, counted by kind, and told in few lines of the log."""

import logging
from collections import Counter
from collections.abc import Callable

QUIET_S = 60.0  # after a line about one kind, until there is another about the same

log = logging.getLogger(__name__)


class Refusals:
    """At most one line about each kind in `QUIET_S`; what happens meanwhile is in the next one, with how often. Owned
    by the endpoint's thread."""

    def __init__(self, clock: Callable[[], float], endpoint: str = "lmcache") -> None:
        """*endpoint* begins each line."""
        self._clock = clock
        self._endpoint = endpoint
        self.counts: Counter[str] = Counter()
        self._told: dict[str, int] = {}  # by kind, the count when there was a line last
        self._told_at: dict[str, float] = {}

    def refused(self, kind: str, what: str) -> None:
        """Count it, and tell of it unless a line about its kind is younger than `QUIET_S`. Kinds are the program's, a
        client chooses none."""
        self.counts[kind] += 1
        now = self._clock()
        if now - self._told_at.get(kind, -QUIET_S) < QUIET_S:
            return
        num_new = self.counts[kind] - self._told.get(kind, 0)
        self._told[kind], self._told_at[kind] = self.counts[kind], now
        log.warning("%s: %s%s", self._endpoint, what, f" ({num_new} times)" if num_new > 1 else "")
