"""Staging: shared memory of the asker's own, through which blocks go that lie in none of the shared memories."""

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
        file = os.memfd_create("kvtier-staging")
        self.close: Callable[[], object] = weakref.finalize(self, os.close, file)
        """Gives the file up; the memory goes with the last view of it. So does what is no longer used."""
        os.ftruncate(file, num_bytes)
        memory = memoryview(mmap.mmap(file, num_bytes))
        self.memory = SharedMemory(file, address_of(memory), num_bytes, is_backed=False)
        # The place that was used last is the next: its pages are there.
        self._free: queue.LifoQueue[memoryview] = queue.LifoQueue()
        for start in range(0, num_bytes, place_bytes):
            self._free.put(memory[start : start + place_bytes])

    @contextmanager
    def place(self) -> Iterator[memoryview]:
        """A place, which is the caller's in here; an empty one if none is free, as one is lost with a call that is
        interrupted."""
        try:
            place = self._free.get_nowait()
        except queue.Empty:
            yield memoryview(bytearray())
            return
        try:
            yield place
        finally:
            self._free.put(place)


def copy(source: memoryview, target: memoryview) -> None:
    """Copy the bytes of *source* to *target*, which has as many, without the interpreter's lock."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
