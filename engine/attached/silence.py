"""Silence: whether a sidecar that is there has stopped answering."""

from collections.abc import Callable

ASK_AFTER_S = 0.25  # without a word, while an answer is waited for: then it is asked whether it lives
LOST_AFTER_S = 1.0  # it is left alone, until it says something
MOST_STEP_S = 0.1  # between two looks that count: an engine that was busy or stopped itself has not listened


class Silence:
    """How long a sidecar has said nothing while it was to say something, in time that the engine has listened. A disk
    may take long to answer; the sidecar's thread itself never does. Owned by the tiers' thread."""

    def __init__(self, ask: Callable[[], None], clock: Callable[[], float]) -> None:
        """*ask* is called to have the sidecar say something."""
        self._ask = ask
        self._clock = clock
        self._looked_at = clock()
        self._silent_s = 0.0
        self._is_asked = False

    @property
    def is_lost(self) -> bool:
        """Whether it has been silent for too long."""
        return self._silent_s > LOST_AFTER_S

    def on_heard(self) -> None:
        """Take in that it has said something."""
        self._silent_s = 0.0
        self._is_asked = False

    def look(self, is_waited_for: bool) -> None:
        """Let time pass. *is_waited_for*: whether an answer is."""
        now = self._clock()
        step, self._looked_at = min(now - self._looked_at, MOST_STEP_S), now
        if is_waited_for or self.is_lost:
            self._silent_s += step
        elif not self._is_asked:
            self._silent_s = 0.0
        if self._silent_s > ASK_AFTER_S and not self._is_asked:
            self._is_asked = True
            self._ask()
