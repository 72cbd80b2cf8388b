"""`ReplyParser`: a parser for redis-py's connections that receives values directly into their final memory."""

import socket
import ssl
import time
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
from redis._parsers import BaseParser
from redis.connection import Connection
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import InvalidResponse
from redis.exceptions import TimeoutError as NoAnswer
from redis.utils import SENTINEL

from kvtier.store.remote.redis.command import Reply

_KEPT_BYTES = 64 << 20  # of memory that is kept for later values, per process
_MIN_BYTES = 128 << 10  # from this size on malloc takes memory from the kernel and returns it there

Memory = npt.NDArray[np.uint8]
_NOTHING_YET = (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_MAX_NESTED = 8  # lists in lists
_MAX_VALUE_BYTES = 512 << 20  # the servers' default of proto-max-bulk-len


class ValueMemory:
    """A pool of memory for received values. Reuse saves time, because using a new page takes as long as a copy.

    Any thread may take memory. The memory returns to the pool once it is no longer used, in the thread that used it
    last.
    """

    def __init__(self) -> None:
        # A deque's methods are atomic. A lock might already be held by the thread in which memory is returned.
        self._free: deque[Memory] = deque()

    def take(self, num_bytes: int) -> memoryview:
        """Return memory of *num_bytes*, with arbitrary bytes."""
        if num_bytes < _MIN_BYTES:
            return np.empty(num_bytes, dtype=np.uint8).data
        memory = self._kept(num_bytes)
        lent = memory[:num_bytes]
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent.data

    def _kept(self, num_bytes: int) -> Memory:
        try:
            memory = self._free.pop()
        except IndexError:
            return np.empty(num_bytes, dtype=np.uint8)
        return memory if num_bytes <= len(memory) < 2 * num_bytes else np.empty(num_bytes, dtype=np.uint8)

    def _give_back(self, memory: Memory) -> None:
        if (len(self._free) + 1) * len(memory) <= _KEPT_BYTES:
            self._free.append(memory)


_MEMORY = ValueMemory()  # shared by all connections, so that each can reuse the others' memory


class ReplyParser(BaseParser):
    """A parser for redis-py's connections (RESP 2) that receives each value directly into memory of its own.

    redis-py's own parsers, including hiredis, receive 32 KiB at a time, append them to a buffer and copy the value out
    of the buffer. This parser receives a value of 1 MiB in a few calls, directly into its memory.

    In redis-py's parsers the timeout applies to each call. Here a deadline limits the whole reply, however slowly it
    arrives. A parser belongs to one connection.
    """

    def __init__(self, socket_read_size: int) -> None:
        self._socket: socket.socket | None = None
        self._silence_s: float | None = None  # timeout of one call on the socket
        self._buffer = bytearray(socket_read_size)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # of the bytes received but not parsed

    def on_connect(self, connection: Connection) -> None:
        self._socket = connection._get_socket()
        self._silence_s = connection.socket_timeout
        self._start = self._end = 0

    def on_disconnect(self) -> None:
        self._socket = None

    def can_read(self, timeout: float = 0) -> bool:
        """Return whether bytes have arrived that no command requested. With TLS they may belong to the TLS protocol."""
        if self._start == self._end:
            open_socket = self._open_socket()
            open_socket.settimeout(timeout)
            try:
                self._fill(None)
            except _NOTHING_YET:
                return False
            finally:
                open_socket.settimeout(self._silence_s)
        return True

    def read_response(self, disable_decoding: bool = False, timeout: Any = SENTINEL) -> Reply:
        """Return the next reply. If the server replies with an error, return the error.

        Raises the error instead if the connection is no longer usable. *timeout* limits the whole reply, in seconds.
        """
        allowed_s = self._silence_s if timeout is SENTINEL else timeout
        return self._reply(None if allowed_s is None else time.monotonic() + allowed_s, _MAX_NESTED)

    def _reply(self, until: float | None, nested: int) -> Reply:
        line = self._line(until)
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return None if rest == b"-1" else self._value(_number(rest), until)
        if kind == b"*" and nested:
            return None if rest == b"-1" else [self._reply(until, nested - 1) for _ in range(_number(rest))]
        if kind == b":":
            return _number(rest)
        if kind == b"+":
            return rest
        if kind != b"-":
            raise InvalidResponse(f"the server sent {line[:40]!r}, which is not a Redis reply")
        return self._refusal(rest.decode(errors="replace"))

    def _refusal(self, text: str) -> Exception:
        """Return the server's error. Raise it if the connection is no longer usable."""
        try:
            error: Exception = self.parse_error(text)
        except ValueError:  # MOVED without an address
            raise InvalidResponse(f"the server sent an error that cannot be parsed: {text[:80]!r}") from None
        if isinstance(error, NoConnection):
            raise error
        return error

    def _line(self, until: float | None) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            self._fill(until)
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def _value(self, num_bytes: int, until: float | None) -> memoryview:
        if not 0 <= num_bytes <= _MAX_VALUE_BYTES:
            raise InvalidResponse(f"the server announced a value of {num_bytes} bytes, which is not a valid length")
        value = _MEMORY.take(num_bytes)
        num_there = min(num_bytes, self._end - self._start)
        value[:num_there] = self._view[self._start : self._start + num_there]
        self._start += num_there
        while num_there < num_bytes:
            num_there += self._receive(value[num_there:], until)
        if self._line(until):
            raise InvalidResponse("the server sent a value that is longer than announced")
        return value

    def _fill(self, until: float | None) -> None:
        """Receive more bytes into the buffer, behind the bytes that are not parsed yet."""
        if self._start:
            rest = self._view[self._start : self._end].tobytes()
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        if self._end == len(self._buffer):
            raise InvalidResponse("the server sent a line that is too long for a Redis reply")
        self._end += self._receive(self._view[self._end :], until)

    def _receive(self, memory: memoryview, until: float | None) -> int:
        if until is not None and time.monotonic() > until:
            raise NoAnswer("the reply timed out")
        num_bytes = self._open_socket().recv_into(memory)
        if not num_bytes:
            raise NoConnection("the server closed the connection")
        return num_bytes

    def _open_socket(self) -> socket.socket:
        open_socket = self._socket
        if open_socket is None:  # another thread has closed the connection
            raise NoConnection("the connection is closed")
        return open_socket


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidResponse(f"the server sent {text[:40]!r} instead of a number") from None
