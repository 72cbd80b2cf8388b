"""Holes: blocks that vLLM offered once, and that the disk did not take."""

from collections import OrderedDict
from collections.abc import Callable, Mapping

MOST_HOLES = 8192  # those that were noted first are forgotten
MOST_AT_ONCE = 64
PAUSE_S = 1.0  # between two offers: a disk that has refused rests for a while


class Holes:
    """vLLM offers a block when it is new, and never again, though it may have it in host memory for hours. So what was
    not stored is noted, and offered again a few at a time. Owned by vLLM's scheduler."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._parents: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._next_at = float("-inf")

    def __len__(self) -> int:
        return len(self._parents)

    def add(self, key: bytes, parent: bytes | None) -> None:
        """Note that this block was not stored; *parent* is the key of the one before it."""
        if not self._parents:
            self._next_at = self._clock() + PAUSE_S
        self._parents[key] = parent
        while len(self._parents) > MOST_HOLES:
            self._parents.popitem(last=False)

    def clear(self) -> None:
        """Forget all of them."""
        self._parents.clear()

    def take(self) -> Mapping[bytes, bytes | None]:
        """Those to offer now, with the keys of the blocks before them: none before the pause is over."""
        if not self._parents or self._clock() < self._next_at:
            return {}
        self._next_at = self._clock() + PAUSE_S
        return dict(self._parents.popitem(last=False) for _ in range(min(MOST_AT_ONCE, len(self._parents))))
