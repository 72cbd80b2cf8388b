"""Stall: ends an engine that has requests and can compute nothing for any of them."""

import time
from collections.abc import Callable

LEAST_S = 60.0  # beyond all deadlines


class CopyHangs(Exception):
    """Requests need slots that copies hold which never end; only a restart gives them back."""


class Stall:
    """Every other wait has a deadline after which something can be computed; this is for what no deadline can give
    back: the slots of a copy that hangs. Owned by the engine's thread."""

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """*deadline_s*: the longest that a request may wait for its hit."""
        self._most_s = LEAST_S + 2 * deadline_s
        self._clock = clock
        self._since: float | None = None

    def look(self, is_stalled: bool, num_copies: int) -> None:
        """After every step. `CopyHangs` if that has gone on for too long, with *num_copies* under way."""
        if not is_stalled:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        elif (stalled_s := self._clock() - self._since) > self._most_s:
            raise CopyHangs(
                f"nothing could be computed for {stalled_s:.0f} s: {num_copies} copies are under way and do not end, "
                "and the requests need their slots; restart"
            )
