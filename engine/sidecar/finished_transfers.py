"""FinishedTransfers: the lanes' queue, with a descriptor, so that one wait is for it and for sockets."""

import os
import queue

from kvtier.transfer.lane import Transfer


class FinishedTransfers(queue.SimpleQueue[Transfer]):
    """The queue of finished transfers, see `Finished`; *file* is readable from each `put` on until `reset`."""

    def __init__(self) -> None:
        super().__init__()
        self.file = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def put(self, item: Transfer, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        os.eventfd_write(self.file, 1)

    def wake(self) -> None:
        """Make *file* readable; from any thread, and from a signal's handler."""
        os.eventfd_write(self.file, 1)

    def reset(self) -> None:
        """*file* is not readable until the next `put`. Look at the queue after this, not before."""
        try:
            os.eventfd_read(self.file)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close the descriptor; nothing may be put any more."""
        os.close(self.file)
