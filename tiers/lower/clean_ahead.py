"""The length of the clean-ahead window: how many of the next victims must have a copy below, so that none waits."""

import math
from collections.abc import Callable

RATE_MEMORY_S = 2.0  # time constant of the averaged allocation rate
GRAIN_S = 0.02  # blocks allocated within this time count as allocated at once
HEADROOM = 2.0  # times what is allocated while one spill is in flight


class CleanAhead:
    """The length of a pool's clean-ahead window, from the measured allocation rate and spill time."""

    def __init__(self, min_blocks: int, max_blocks: int, clock: Callable[[], float]) -> None:
        self._minimum = min_blocks
        self._limit = max_blocks
        self._clock = clock
        self._rate = 0.0  # blocks per second
        self._rate_at = clock()
        self._num_new = 0  # blocks allocated since `_rate_at`
        self._spill_s = 0.0

    def on_allocated(self, num_blocks: int) -> None:
        """Record that blocks were allocated from the pool."""
        if self._clock() - self._rate_at >= GRAIN_S:
            self._rate_now()
        self._num_new += num_blocks

    def on_spilled(self, seconds: float) -> None:
        """Record how long a spill took, from its submission to the owner's poll."""
        self._spill_s = seconds if self._spill_s == 0 else 0.8 * self._spill_s + 0.2 * seconds

    @property
    def num_blocks(self) -> int:
        """Current length of the window."""
        if self._spill_s == 0:
            return min(self._limit, self._minimum)
        return min(self._limit, max(self._minimum, math.ceil(HEADROOM * self._rate_now() * self._spill_s)))

    @property
    def depth(self) -> int:
        """Number of blocks that should be clean or free: the window, but at least the minimum even in a small pool."""
        return max(self._minimum, self.num_blocks)

    def _rate_now(self) -> float:
        now = self._clock()
        taken = self._rate + self._num_new / RATE_MEMORY_S
        self._rate = taken * math.exp((self._rate_at - now) / RATE_MEMORY_S)
        self._rate_at, self._num_new = now, 0
        return self._rate
