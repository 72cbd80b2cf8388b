"""FinishedTransfers: the lanes' queue, with a descriptor, so that one wait is for it and for sockets."""

import os
import queue
import sys
from contextlib import suppress
from io import FileIO

from kvtier.transfer.lane import Transfer

_ONE = (1).to_bytes(8, sys.byteorder)  # what eventfd(2) takes


class FinishedTransfers(queue.SimpleQueue[Transfer]):
    """The queue of finished transfers, see `Finished`; *file* is readable from each `put` on until `reset`."""

    def __init__(self) -> None:
        super().__init__()
        # A file object, and no number: what is closed is not written to, whoever has the number by then.
        self._event = FileIO(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), "r+")

    @property
    def file(self) -> int:
        """The descriptor to wait for; ValueError once it is closed."""
        return self._event.fileno()

    def put(self, item: Transfer, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self._event.write(_ONE)

    def wake(self) -> None:
        """Make *file* readable; from any thread, and from a signal's handler. Nothing happens once it is closed."""
        with suppress(ValueError):
            self._event.write(_ONE)

    def reset(self) -> None:
        """*file* is not readable until the next `put`. Look at the queue after this, not before."""
        self._event.read(8)  # None, and no wait, if it is not readable

    def close(self) -> None:
        """Close the descriptor; nothing may be put any more. Idempotent."""
        self._event.close()
