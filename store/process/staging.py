"""Staging: buffers in shared memory, for blocks whose own memory is not shared with the store's process."""

import errno
import mmap
import os
import queue
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvtier.store.process.channel import SharedMemory, address_of


class Staging:
    """A pool of *num_places* buffers of *place_bytes* each in shared memory, one for each concurrent call.

    Blocks that are not in shared memory are copied through a buffer. Over the socket they would be pickled and copied
    four times, which takes three times as long. A buffer takes no memory before its first use.
    """

    def __init__(self, num_places: int, place_bytes: int) -> None:
        num_bytes = num_places * place_bytes
        file = _memory_file()
        self.close: Callable[[], object] = weakref.finalize(self, os.close, file)
        """Close the file. Its memory is freed once no view of it is left. Garbage collection also closes the file."""
        os.ftruncate(file, num_bytes)
        self._file, self._place_bytes = file, place_bytes
        self._backed: set[int] = set()  # places whose memory is allocated
        memory = memoryview(mmap.mmap(file, num_bytes))
        self.memory = SharedMemory(file, address_of(memory), num_bytes, is_backed=False)
        # The most recently used place is taken first, because its pages are allocated.
        self._places = memory
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        for start in range(0, num_bytes, place_bytes):
            self._free.put(start)

    @contextmanager
    def place(self) -> Iterator[memoryview]:
        """Lend a buffer to the caller for the duration of the `with` block.

        The view is empty if there is no memory for a buffer or if no buffer is free. There is one for each concurrent
        call, but an interrupted call may fail to return its buffer.
        """
        try:
            start = self._free.get_nowait()
        except queue.Empty:
            yield memoryview(bytearray())
            return
        try:
            yield self._places[start : start + self._place_bytes] if self._is_backed(start) else memoryview(bytearray())
        finally:
            self._free.put(start)

    def _is_backed(self, start: int) -> bool:
        """Allocate the memory of the buffer at *start* before its first use. Returns False if the kernel has no memory.

        Touching a page that the kernel cannot allocate would raise SIGBUS.
        """
        if start not in self._backed:
            try:
                os.posix_fallocate(self._file, start, self._place_bytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    return False
            self._backed.add(start)
        return True


def _memory_file() -> int:
    try:
        return os.memfd_create("kvtier-staging")
    except OSError:  # forbidden in a sandbox
        return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def copy(source: memoryview, target: memoryview) -> None:
    """Copy the bytes of *source* to *target*, which has the same length, without holding the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
