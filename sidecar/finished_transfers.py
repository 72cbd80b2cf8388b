"""FinishedTransfers: a queue of finished transfers that a thread can wait for together with sockets."""

import os
import queue
import sys
from contextlib import suppress
from io import FileIO

from kvtier.transfer.lane import Transfer

_ONE = (1).to_bytes(8, sys.byteorder)  # an increment for eventfd(2)


class FinishedTransfers(queue.SimpleQueue[Transfer]):
    """A queue of finished transfers. The descriptor *file* is readable from each `put` until the next `reset`."""

    def __init__(self) -> None:
        super().__init__()
        # A file object instead of a number: once it is closed, no write can hit a file that has reused the number.
        self._event = FileIO(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), "r+")

    @property
    def file(self) -> int:
        """File descriptor that is readable from each `put` or `wake` until `reset`. Raises ValueError after `close`."""
        return self._event.fileno()

    def put(self, item: Transfer, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self._event.write(_ONE)

    def wake(self) -> None:
        """Make *file* readable, unless it is closed. May be called by any thread and by signal handlers."""
        with suppress(ValueError):
            self._event.write(_ONE)

    def reset(self) -> None:
        """Make polls of *file* wait until the next `put`. Call this before reading the queue, to miss no transfer."""
        self._event.read(8)  # returns None at once if it is not readable

    def close(self) -> None:
        """Close the descriptor. Do not call `put` after this. Idempotent."""
        self._event.close()
