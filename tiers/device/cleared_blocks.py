"""`ClearedBlocks`: the names and other data of the blocks of a cleared pool, which are read and freed in parts."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from kvtier.tiers.device.eviction_order import Run
from kvtier.tiers.naming.block_hash import BlockName

Container = dict[Any, Any] | set[Any] | list[Any] | deque[Any]
AT_ONCE = 256  # names or other items in one part, which takes 0.1 ms of the owner's thread


class Leftovers:
    """Containers whose items are no longer used. They are freed in parts, because freeing a million items takes 50 ms.

    Owned by one thread.
    """

    def __init__(self) -> None:
        self._containers: list[Container] = []

    def add(self, container: Container) -> None:
        """Take ownership of a container."""
        self._containers.append(container)

    def free_some(self) -> bool:
        """Free the next items; return False if none were left."""
        for num_left in range(AT_ONCE, 0, -1):
            while self._containers and not self._containers[-1]:
                self._containers.pop()
            if not self._containers:
                return num_left < AT_ONCE
            last = self._containers[-1]
            if isinstance(last, dict):
                last.popitem()
            else:
                last.pop()
        return True


class ClearedBlocks:
    """The names of the blocks that a pool had when it was cleared. They are returned and freed in parts.

    The pool itself keeps no data of these blocks. Owned by the pool's thread.
    """

    def __init__(self, names: Iterator[list[BlockName]], runs: dict[int, Run]) -> None:
        """Take ownership of the pool's former *runs*. *names* yields the names in parts and frees them."""
        self._names = names
        self._runs = runs
        self.leftovers = Leftovers()  # other data of these blocks

    def pop(self) -> list[BlockName] | None:
        """Return the next names and free them here; None if everything has been freed.

        After the last name, calls free other data, and return empty lists.
        """
        names = next(self._names, None)
        if names is not None:
            return names
        if self._runs:
            num_freed = 0
            while self._runs and num_freed < AT_ONCE:
                num_freed += len(self._runs.popitem()[1].slots)
            return []
        return [] if self.leftovers.free_some() else None
