"""How a store's process is spoken to: questions and answers over a socket, bytes of blocks through shared memory."""

import contextlib
import errno
import mmap
import os
import pickle
import socket
import struct
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakSet

import numpy as np

_MADV_POPULATE_WRITE = 23  # <linux/mman.h>; Python's mmap does not name it
_WARM_STEP_BYTES = 4 << 20  # the interpreter's lock is held for one step: 2 ms
_HEADER = struct.Struct("=QQ")  # of a message: bytes in all, number
_PIECE_BYTES = 64 << 10  # all of a question or answer, unless bytes of blocks are in it


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


class NoAnswer(Exception):
    """The other side is gone, or silent for too long. Not an error of the store's: those are answers."""

    @property
    def is_silence(self) -> bool:
        """Whether the other side may still be there."""
        return not isinstance(self.__cause__, EOFError | OSError) or isinstance(self.__cause__, TimeoutError)


class Channel:
    """The asker's end of a socket, for one question at a time.

    Each question has a number, and its answer the same. After `NoAnswer` or an interruption an answer may still come,
    and memory be written for it: then only the end of the other process makes the channels to it harmless.
    One that nobody has any more hangs up, as a forked child does at once: it must not keep the other side waiting.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._number = 0
        _channels.add(self)

    def ask(self, question: bytes, timeout_s: float) -> memoryview:
        """The answer; `NoAnswer` if nobody is there, or after *timeout_s* of silence."""
        self._number += 1
        try:
            self._socket.settimeout(timeout_s)
            send(self._socket, self._number, question)
            number, answer = receive(self._socket)
        except TimeoutError as error:
            raise NoAnswer(f"no answer in {timeout_s:.0f} s") from error
        except (EOFError, OSError) as error:
            raise NoAnswer("its process ended") from error
        if number != self._number:
            raise NoAnswer("it answered another question")
        return answer

    def hang_up(self) -> None:
        """Close this process's end."""
        self._socket.close()

    __del__ = hang_up


_channels: WeakSet[Channel] = WeakSet()


def _hang_up_all() -> None:
    for channel in list(_channels):
        channel.hang_up()


os.register_at_fork(after_in_child=_hang_up_all)


def send(end: socket.socket, number: int, message: bytes) -> None:
    """Send a whole message; OSError if that is not possible, TimeoutError after the socket's timeout."""
    end.sendall(_HEADER.pack(_HEADER.size + len(message), number) + message)


def receive(end: socket.socket) -> tuple[int, memoryview]:
    """Number and bytes of the next message; EOFError at the end, TimeoutError after the socket's timeout of silence."""
    data = bytearray()
    while len(data) < _HEADER.size or len(data) < _HEADER.unpack_from(data)[0]:
        piece = end.recv(_PIECE_BYTES)
        if not piece:
            raise EOFError
        data += piece
    return _HEADER.unpack_from(data)[1], memoryview(data)[_HEADER.size :]


def portable(error: Exception) -> Exception:
    """*error*, if another process can have it; else an OSError that has its text."""
    try:
        pickle.loads(pickle.dumps(error))  # some can be packed and not unpacked
    except Exception:  # whatever their own code raises
        return OSError(errno.EIO, f"{type(error).__name__}: {error}")
    return error
