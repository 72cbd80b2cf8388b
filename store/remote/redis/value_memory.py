"""`ValueMemory`: memory for values, used again once nobody looks at it."""

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

_KEPT_BYTES = 64 << 20  # of a process
_LEAST_BYTES = 128 << 10  # malloc takes anything from here on from the kernel, and gives it back

Memory = npt.NDArray[np.uint8]


class ValueMemory:
    """Gives out memory, and keeps some of what has come back: a page that is new to a process costs as much as a copy.

    Any thread may take; what was taken comes back by itself, in the thread that looked at it last.
    """

    def __init__(self) -> None:
        # Its methods are whole. A lock might be held by the very thread in which memory comes back.
        self._free: deque[Memory] = deque()

    def take(self, num_bytes: int) -> memoryview:
        """Memory of *num_bytes*, with arbitrary bytes."""
        if num_bytes < _LEAST_BYTES:
            return np.empty(num_bytes, dtype=np.uint8).data
        memory = self._kept(num_bytes)
        lent = memory[:num_bytes]
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent.data

    def _kept(self, num_bytes: int) -> Memory:
        try:
            memory = self._free.pop()
        except IndexError:
            return np.empty(num_bytes, dtype=np.uint8)
        return memory if num_bytes <= len(memory) < 2 * num_bytes else np.empty(num_bytes, dtype=np.uint8)

    def _give_back(self, memory: Memory) -> None:
        if (len(self._free) + 1) * len(memory) <= _KEPT_BYTES:
            self._free.append(memory)
