"""FinishedTransfers: a queue of finished transfers, with a descriptor so that one wait covers transfers and sockets."""

import os
import queue
import sys
from contextlib import suppress
from io import FileIO

from kvtier.transfer.lane import Transfer

_ONE = (1).to_bytes(8, sys.byteorder)  # an increment for eventfd(2)


class FinishedTransfers(queue.SimpleQueue[Transfer]):
    """A queue of finished transfers (see `Finished`) whose *file* is readable from each `put` until `reset`."""

    def __init__(self) -> None:
        super().__init__()
        # A file object instead of a number: once it is closed, no write can hit a file that has reused the number.
        self._event = FileIO(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), "r+")

    @property
    def file(self) -> int:
        """The descriptor to wait for. Raises ValueError once it is closed."""
        return self._event.fileno()

    def put(self, item: Transfer, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self._event.write(_ONE)

    def wake(self) -> None:
        """Make *file* readable; do nothing once it is closed. Callable from any thread and from signal handlers."""
        with suppress(ValueError):
            self._event.write(_ONE)

    def reset(self) -> None:
        """Make *file* unreadable until the next `put`. Read the queue only after this call, to miss no transfer."""
        self._event.read(8)  # returns None at once if it is not readable

    def close(self) -> None:
        """Close the descriptor; nothing may be put after this. Idempotent."""
        self._event.close()
