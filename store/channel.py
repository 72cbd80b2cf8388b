"""How a store's process is spoken to: questions and answers over a socket, bytes of blocks through shared memory."""

import contextlib
import mmap
from bisect import bisect_right
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

_MADV_POPULATE_WRITE = 23  # <linux/mman.h>; Python's mmap does not name it
_WARM_STEP_BYTES = 4 << 20  # the interpreter's lock is held for one step: 2 ms


class SharedMemory(NamedTuple):
    """Memory of this process that is a file: a host slab. The file's bytes from 0 on are the memory's."""

    file: int  # descriptor
    address: int
    num_bytes: int


class Place(NamedTuple):
    """Bytes in one of the shared memories: the same in both processes."""

    memory: int
    offset: int
    num_bytes: int


# What goes over the socket for a piece of memory: where it is, or, if it is not shared, the bytes themselves.
Bytes = Place | bytes


class MemoryMap:
    """Finds the place of a view in shared memory."""

    def __init__(self, memories: Sequence[SharedMemory]) -> None:
        order = sorted(range(len(memories)), key=lambda i: memories[i].address)
        self._order = order
        self._starts = [memories[i].address for i in order]
        self._ends = [memories[i].address + memories[i].num_bytes for i in order]

    def place(self, view: memoryview) -> Place | None:
        """Where *view* (contiguous) is; None if in no shared memory."""
        if not view.nbytes:
            return None
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        i = bisect_right(self._starts, address) - 1
        if i < 0 or address + view.nbytes > self._ends[i]:
            return None
        return Place(self._order[i], address - self._starts[i], view.nbytes)


class Mappings:
    """The other side: the shared memories as this process has them."""

    def __init__(self, memories: Sequence[tuple[int, int]]) -> None:
        """*memories*: file descriptor and size of each."""
        self._maps = [mmap.mmap(file, max(num_bytes, mmap.PAGESIZE)) for file, num_bytes in memories]
        self._views = [memoryview(shared) for shared in self._maps]

    def warm(self) -> None:
        """Enter the pages in this process's page table, so that a first copy is as fast as a later one."""
        for shared in self._maps:
            for offset in range(0, len(shared), _WARM_STEP_BYTES):
                with contextlib.suppress(OSError, ValueError):  # Linux before 5.14 does not know how
                    shared.madvise(_MADV_POPULATE_WRITE, offset, min(_WARM_STEP_BYTES, len(shared) - offset))

    def view(self, piece: Bytes) -> memoryview:
        """The piece, writable if it is shared."""
        if isinstance(piece, bytes):
            return memoryview(piece)
        return self._views[piece.memory][piece.offset : piece.offset + piece.num_bytes]


class Channel:
    """One connection, for one question at a time: a method of the store's and its arguments; (True, result) comes back,
    or (False, error)."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection

    def ask(self, timeout_s: float, method: str, *arguments: Any) -> Any:
        """What the method gives, or raises. TimeoutError if it takes longer, EOFError or OSError if nobody is there."""
        self._connection.send((method, arguments))
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"no answer to {method} in {timeout_s:.0f} s")
        is_good, value = self._connection.recv()
        if not is_good:
            raise value
        return value

    def wait_hung_up(self) -> None:
        """Return when the other side is no more."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._connection.recv_bytes()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
