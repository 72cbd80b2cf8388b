"""WaitingRoom: how many completions may be here at once, and when to come again if it is full."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NUM_REMEMBERED = 64
_LONGEST_WAIT_S = 600


class RoomFull(Exception):
    """There is no room now; probably there is after *retry_after_s*."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class WaitingRoom:
    """Holds *capacity* completions, running or waiting. Owned by the event loop.

    The wait is what it takes until enough have left, as fast as the last ones did. Time in which nobody was here
    says nothing about that and does not count.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.num_inside = 0
        self._clock = clock
        self._earlier_s = 0.0  # how long somebody was here, before *_busy_since*
        self._busy_since = 0.0
        self._left: deque[tuple[float, int]] = deque(maxlen=_NUM_REMEMBERED)  # busy seconds then, and how many

    @contextmanager
    def enter(self, num_completions: int) -> Iterator[None]:
        """Be here with so many. RoomFull if they have no room."""
        excess = self.num_inside + num_completions - self.capacity
        if excess > 0:
            raise RoomFull(self._wait_s(excess))
        if not self.num_inside:
            self._busy_since = self._clock()
        self.num_inside += num_completions
        try:
            yield
        finally:
            self._left.append((self._busy_s(), num_completions))
            if self.num_inside == num_completions:
                self._earlier_s = self._busy_s()
            self.num_inside -= num_completions

    def _busy_s(self) -> float:
        return self._earlier_s + (self._clock() - self._busy_since if self.num_inside else 0.0)

    def _wait_s(self, excess: int) -> int:
        began_s = self._left[0][0] if len(self._left) > 1 else 0.0
        num_left = sum(num for _, num in self._left) - (self._left[0][1] if len(self._left) > 1 else 0)
        seconds = excess * (self._busy_s() - began_s) / max(1, num_left)
        return max(1, min(math.ceil(seconds), _LONGEST_WAIT_S))
