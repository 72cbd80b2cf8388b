"""Fading: counts of which older ones weigh less."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt


class Fading:
    """So many counts, all at first 0. What was counted *half_life_s* ago weighs half."""

    def __init__(self, num_counts: int, half_life_s: float, clock: Callable[[], float]) -> None:
        self._counts = np.zeros(num_counts)
        self._half_life_s = half_life_s
        self._clock = clock
        self._counted_at = clock()

    def now(self) -> npt.NDArray[np.float64]:
        """The counts now `[num_counts]`, to read and to add to before the next call."""
        now = self._clock()
        if now != self._counted_at:
            self._counts *= 0.5 ** ((now - self._counted_at) / self._half_life_s)
            self._counted_at = now
        return self._counts
