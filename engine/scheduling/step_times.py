"""StepTimes: tells `PrefillSpeed` how long steps took, also where the device computes after the call has returned."""

import time
from collections.abc import Callable, Sequence

from kvtier.engine.scheduling.scheduler import Work
from kvtier.tiers.up.prefill_speed import PrefillSpeed, tokens_read

MIN_S = 60.0  # beyond all deadlines


class StepTimes:
    """Gathers the times of steps until one ends with a sampled token: only then are all known to be computed.

    Steps that prefill nothing say nothing about prefill and are left out. Owned by the engine's thread.
    """

    def __init__(self, prefill: PrefillSpeed, min_tokens: int) -> None:
        """*min_tokens*: a step that computes as many of one request counts as prefill."""
        self._prefill = prefill
        self._min_tokens = min_tokens
        self._is_prefill = False
        self._num_steps = 0
        self._num_tokens = 0
        self._num_read = 0.0
        self._seconds = 0.0

    def on_step(self, work: Sequence[Work], depths: Sequence[int], seconds: float, has_sampled: bool) -> None:
        """Count one step, which computed *work* behind *depths* tokens of its requests."""
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
    """Copies that never end hold the slots that requests need; only a restart gives them back."""


class Stall:
    """Watches for steps in which nothing can be computed, and raises when they have lasted too long.

    Every other wait has a deadline after which something can be computed. No deadline gives back the slots of a copy
    that hangs. Owned by the engine's thread.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """*deadline_s*: the longest that a request may wait for its hit."""
        self._max_s = MIN_S + 2 * deadline_s
        self._clock = clock
        self._since: float | None = None

    def look(self, is_stalled: bool, num_copies: int) -> None:
        """Note after each step whether it had nothing to compute. `CopyHangs` if that has lasted for too long."""
        if not is_stalled:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        elif (stalled_s := self._clock() - self._since) > self._max_s:
            raise CopyHangs(
                f"nothing could be computed for {stalled_s:.0f} s: {num_copies} copies are under way and do not end, "
                "and the requests need their slots; restart"
            )
