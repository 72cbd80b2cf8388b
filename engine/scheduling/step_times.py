"""StepTimes: measures how fast steps compute prompts. Stall: detects that no step can compute anything."""

import time
from collections.abc import Callable, Sequence

from kvtier.engine.scheduling.scheduler import Work
from kvtier.tiers.up.prefill_speed import PrefillSpeed, tokens_read

MIN_S = 60.0  # longer than all deadlines


class StepTimes:
    """The summed times of steps, reported to `PrefillSpeed` once a step ends with a sampled token.

    The device may still compute after the call of a step has returned. Sampling waits for the device, so a sampled
    token shows that all steps before are done. Steps without prefill are not reported, because they say nothing about
    its speed. Owned by the engine's thread.
    """

    def __init__(self, prefill: PrefillSpeed, min_tokens: int) -> None:
        """Report to *prefill*; a step counts as prefill if it computes at least *min_tokens* of one request."""
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
    """Raised if copies that never end hold the slots that requests need. Only a restart frees these slots."""


class Stall:
    """A watchdog for consecutive steps in which nothing can be computed.

    Every other wait has a deadline, after which something can be computed. But no deadline frees the slots of a copy
    that hangs. Owned by the engine's thread.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a watchdog; *deadline_s* is the maximum time that loading a request's hit may take."""
        self._max_s = MIN_S + 2 * deadline_s
        self._clock = clock
        self._since: float | None = None

    def look(self, is_stalled: bool, num_copies: int) -> None:
        """Record after each step whether it had nothing to compute; raise `CopyHangs` if that has lasted too long."""
        if not is_stalled:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        elif (stalled_s := self._clock() - self._since) > self._max_s:
            raise CopyHangs(
                f"no step could compute anything for {stalled_s:.0f} s: {num_copies} copies are in flight and do not "
                "end, and requests need their slots; restart the engine"
            )
