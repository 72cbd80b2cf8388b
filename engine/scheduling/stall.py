"""Stall: ends an engine that has requests and can compute nothing for any of them."""

import time
from collections.abc import Callable

LEAST_S = 60.0  # beyond all deadlines


class CopyHangs(Exception):
    """Copies that never end hold the slots that requests need; only a restart gives them back."""


class Stall:
    """Watches for steps in which nothing can be computed, and raises when they have lasted too long.

    Every other wait has a deadline after which something can be computed. No deadline gives back the slots of a copy
    that hangs. Owned by the engine's thread.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """*deadline_s*: the longest that a request may wait for its hit."""
        self._most_s = LEAST_S + 2 * deadline_s
        self._clock = clock
        self._since: float | None = None

    def look(self, is_stalled: bool, num_copies: int) -> None:
        """Note after each step whether it had nothing to compute. `CopyHangs` if that has lasted for too long."""
        if not is_stalled:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        elif (stalled_s := self._clock() - self._since) > self._most_s:
            raise CopyHangs(
                f"nothing could be computed for {stalled_s:.0f} s: {num_copies} copies are under way and do not end, "
                "and the requests need their slots; restart"
            )
