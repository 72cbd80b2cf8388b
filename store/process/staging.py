"""Staging: shared memory of the asker's own, through which blocks go that lie in none of the shared memories."""

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
    """*num_places* of *place_bytes* each, for one call at a time. Pages that no block went through take no memory.

    Sent over the socket instead, blocks are pickled and copied four times: a third of the speed.
    """

    def __init__(self, num_places: int, place_bytes: int) -> None:
        num_bytes = num_places * place_bytes
        file = _memory_file()
        self.close: Callable[[], object] = weakref.finalize(self, os.close, file)
        """Gives the file up; the memory goes with the last view of it. So does what is no longer used."""
        os.ftruncate(file, num_bytes)
        self._file, self._place_bytes = file, place_bytes
        self._backed: set[int] = set()  # places whose memory is there
        memory = memoryview(mmap.mmap(file, num_bytes))
        self.memory = SharedMemory(file, address_of(memory), num_bytes, is_backed=False)
        # The place that was used last is the next: its pages are there.
        self._places = memory
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        for start in range(0, num_bytes, place_bytes):
            self._free.put(start)

    @contextmanager
    def place(self) -> Iterator[memoryview]:
        """A place, which is the caller's in here; an empty one if none is free, as one is lost with a call that is
        interrupted, or if there is no memory for it."""
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
        """Have the kernel allocate a place before it is touched: a page that it refuses then is SIGBUS."""
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
    except OSError:  # a sandbox forbids it
        return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def copy(source: memoryview, target: memoryview) -> None:
    """Copy the bytes of *source* to *target*, which has as many, without the interpreter's lock."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
