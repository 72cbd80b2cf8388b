"""StepTimes: measures how fast steps compute prompts. Stall: detects that no step can compute anything."""

import time
from collections.abc import Callable, Sequence

from kvtier.engine.scheduling.scheduler import Work
from kvtier.tiers.up.prefill_speed import PrefillSpeed, tokens_read

MIN_S = 60.0  # longer than all deadlines


class StepTimes:
    """A stopwatch for steps, from which `PrefillSpeed` learns how fast the device computes prompts.

    The call of a step may return while the device still computes, but sampling a token waits for the device. So the
    times of steps are summed until a step samples a token, and then reported. Sums without any prefill are dropped,
    because they say nothing about its speed. Owned by the engine's thread.
    """

    def __init__(self, prefill: PrefillSpeed, min_tokens: int) -> None:
        """Create a stopwatch that reports the times of steps to *prefill*.

        A step counts as prefill if it computes at least *min_tokens* tokens of one request.
        """
        self._prefill = prefill
        self._min_tokens = min_tokens
        self._is_prefill = False
        self._num_steps = 0
        self._num_tokens = 0
        self._num_read = 0.0
        self._seconds = 0.0

    def on_step(self, work: Sequence[Work], depths: Sequence[int], seconds: float, has_sampled: bool) -> None:
        """Count one step that computed *work* in *seconds*.

        *depths* has, for each item of *work*, the number of its request's tokens that were computed before the step.
        """
        self._num_steps += 1
        for item, depth in zip(work, depths, strict=True):
            self._num_tokens += item.num_tokens
            self._num_read += tokens_read(depth, item.num_tokens)
            self._is_prefill |= item.num_tokens >= self._min_tokens
        self._seconds += seconds
        if has_sampled:
            if self._is_prefill:
                self._prefill.on_computed(self._num_tokens, self._num_read, self._seconds, self._num_steps)
            self._is_prefill = False
            self._num_steps = self._num_tokens = 0
            self._num_read = self._seconds = 0.0


class CopyHangs(Exception):
    """Raised if requests need slots that are held by copies that never end. Only a restart frees these slots."""


class Stall:
    """A watchdog that detects that the engine computes nothing because hanging copies hold its slots.

    All waits except those for copies end at a deadline. So if no step computes anything for longer than all deadlines,
    a hanging copy is the cause. Owned by the engine's thread.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a watchdog. *deadline_s* is the maximum time that loading a request's hit may take."""
        self._max_s = MIN_S + 2 * deadline_s
        self._clock = clock
        self._since: float | None = None

    def look(self, is_stalled: bool, num_copies: int) -> None:
        """Record whether the last step had nothing to compute. Raise `CopyHangs` if that has lasted too long."""
        if not is_stalled:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        elif (stalled_s := self._clock() - self._since) > self._max_s:
            raise CopyHangs(
                f"no step could compute anything for {stalled_s:.0f} s: {num_copies} copies hang and hold the "
                "slots that requests need; restart the engine"
            )
