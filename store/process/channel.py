"""The channel to a store's process: requests and responses go over a socket, block bytes through shared memory."""

import contextlib
import ctypes
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

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # from <linux/mman.h>; Python's mmap does not define them
_WARM_STEP_BYTES = 4 << 20  # populated at a time with the GIL held, for 2 ms
_HEADER = struct.Struct("=QQ")  # of a message: its total bytes, the number of its request
_PIECE_BYTES = 64 << 10  # holds a whole request or response, unless it contains block bytes


class SharedMemory(NamedTuple):
    """Memory that is shared with the store's process, such as the host tier's. It maps a file from byte 0 on."""

    file: int  # descriptor
    address: int
    num_bytes: int
    is_backed: bool = True  # whether all pages are or soon will be allocated, so that populating them is free


Place = tuple[int, int, int]
"""A byte range in shared memory, as both processes name it: index of the memory, offset, length.

Not a class, because hundreds are pickled per request.
"""

# Sent over the socket for a piece of memory: its place or, if it is not shared, the bytes themselves.
Bytes = Place | bytes


class MemoryMap:
    """The client's list of shared memories. It finds the memory that contains a given view."""

    def __init__(self, memories: Sequence[SharedMemory]) -> None:
        order = sorted(range(len(memories)), key=lambda i: memories[i].address)
        self._order = order
        self._starts = [memories[i].address for i in order]
        self._ends = [memories[i].address + memories[i].num_bytes for i in order]

    def place(self, view: memoryview) -> Place | None:
        """Return the place of *view* (contiguous) in shared memory, or None if the view is not in shared memory."""
        if not view.nbytes:
            return None
        address = address_of(view)
        i = bisect_right(self._starts, address) - 1
        if i < 0 or address + view.nbytes > self._ends[i]:
            return None
        return self._order[i], address - self._starts[i], view.nbytes


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a view (contiguous, not empty) in this process."""
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))  # an eighth of the time of numpy's way
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


class Mappings:
    """The server's side of shared memory, which maps the client's memories into this process."""

    def __init__(self, memories: Sequence[tuple[int, int, bool]]) -> None:
        """Map *memories*, each given by the fields `file`, `num_bytes` and `is_backed` of its `SharedMemory`."""
        self._maps = [mmap.mmap(file, max(num_bytes, mmap.PAGESIZE)) for file, num_bytes, _ in memories]
        self._views = [memoryview(shared) for shared in self._maps]
        self._is_backed = [is_backed for _, _, is_backed in memories]
        # For each memory, a byte for each `_WARM_STEP_BYTES`: 1 if this process's page table has them.
        self._entered = [bytearray(-(-len(shared) // _WARM_STEP_BYTES)) for shared in self._maps]

    def warm(self) -> None:
        """Populate this process's page table, so that first copies are as fast as later ones.

        Skips memories without `SharedMemory.is_backed`, because populating them would allocate memory that the
        client may never use.
        """
        for shared, entered, is_backed in zip(self._maps, self._entered, self._is_backed, strict=True):
            for step in range(len(entered) if is_backed else 0):
                offset = step * _WARM_STEP_BYTES
                with contextlib.suppress(OSError, ValueError):  # not supported before Linux 5.14
                    shared.madvise(_MADV_POPULATE_WRITE, offset, min(_WARM_STEP_BYTES, len(shared) - offset))
                    entered[step] = 1

    def enter(self, piece: Bytes) -> None:
        """Populate this process's page table for *piece*, which is about to be written through the page cache.

        If a page were missing during the write, Linux would cache the file in small pages. Each later read from the
        page cache would then take nearly twice as long. Does nothing for bytes that were populated before.
        """
        if isinstance(piece, bytes):
            return
        memory, offset, num_bytes = piece
        entered, shared = self._entered[memory], self._maps[memory]
        first, end = offset // _WARM_STEP_BYTES, -(-(offset + num_bytes) // _WARM_STEP_BYTES)
        if all(entered[first:end]):
            return
        start = offset - offset % mmap.PAGESIZE
        with contextlib.suppress(OSError, ValueError):  # not supported before Linux 5.14
            shared.madvise(_MADV_POPULATE_READ, start, offset + num_bytes - start)
        inner = range(-(-offset // _WARM_STEP_BYTES), (offset + num_bytes) // _WARM_STEP_BYTES)
        entered[inner.start : inner.stop] = b"\1" * len(inner)

    def view(self, piece: Bytes) -> memoryview:
        """Return the bytes of *piece* as a view, which is writable if the piece is in shared memory."""
        if isinstance(piece, bytes):
            return memoryview(piece)
        memory, offset, num_bytes = piece
        return self._views[memory][offset : offset + num_bytes]


class NoAnswer(Exception):
    """Error raised if the other process did not respond to a request, because it ended or timed out.

    An error of the store itself arrives as an ordinary response.
    """

    @property
    def is_no_reply(self) -> bool:
        """True if the other process may still be alive, although it did not respond."""
        return not isinstance(self.__cause__, EOFError | OSError) or isinstance(self.__cause__, TimeoutError)


class Channel:
    """The client's end of a socket to the store's process, for one request at a time.

    A response carries the number of its request. After `NoAnswer` or an interruption the caller must end the other
    process, because it may still send the response or write to shared memory.

    The socket is closed when the channel is garbage-collected. In a forked child it is closed at once. Otherwise the
    other process would not notice that this process closes its end.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._number = 0
        _channels.add(self)

    def ask(self, question: bytes, timeout_s: float) -> memoryview:
        """Send *question* and return the response.

        Raises `NoAnswer` if the process has ended or does not respond within *timeout_s*.
        """
        self._number += 1
        try:
            self._socket.settimeout(timeout_s)
            send(self._socket, self._number, question)
            number, answer = receive(self._socket)
        except TimeoutError as error:
            raise NoAnswer(f"no answer in {timeout_s:.0f} s") from error
        except (EOFError, OSError) as error:
            raise NoAnswer("the store's process ended") from error
        if number != self._number:
            raise NoAnswer("the store's process answered another request")
        return answer

    def disconnect(self) -> None:
        """Close this process's end of the socket."""
        self._socket.close()

    __del__ = disconnect


_channels: WeakSet[Channel] = WeakSet()


def _hang_up_all() -> None:
    for channel in list(_channels):
        channel.disconnect()


os.register_at_fork(after_in_child=_hang_up_all)


def send(end: socket.socket, number: int, message: bytes) -> None:
    """Send a whole message. Raises OSError if that fails, TimeoutError after the socket's timeout."""
    end.sendall(_HEADER.pack(_HEADER.size + len(message), number) + message)


def receive(end: socket.socket) -> tuple[int, memoryview]:
    """Return the number and the bytes of the next message.

    Raises EOFError if the other end was closed, TimeoutError after the socket's timeout.
    """
    data = bytearray()
    while len(data) < _HEADER.size or len(data) < _HEADER.unpack_from(data)[0]:
        piece = end.recv(_PIECE_BYTES)
        if not piece:
            raise EOFError
        data += piece
    return _HEADER.unpack_from(data)[1], memoryview(data)[_HEADER.size :]


def portable(error: Exception) -> Exception:
    """Return *error* itself if it can be pickled for another process, else an OSError with its text."""
    try:
        pickle.loads(pickle.dumps(error))  # some errors can be pickled but not unpickled
    except Exception:  # pickling runs code of the error, which may raise anything
        return OSError(errno.EIO, f"{type(error).__name__}: {error}")
    return error
