"""TakenAtOnce: the queue of finished transfers where no thread waits for it."""

import queue
from collections.abc import Callable

from kvtier.transfer.lane import Transfer


class TakenAtOnce(queue.SimpleQueue[Transfer]):
    """See `Finished`. The thread that puts a transfer in has it taken out, by *take*."""

    def __init__(self, take: Callable[[], None]) -> None:
        super().__init__()
        self._take = take

    def put(self, item: Transfer, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self._take()
