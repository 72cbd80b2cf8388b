"""FrameProxy: stands between LMCache's clients and a server, reads which operation each request is, and does a deed
just before one of them goes on. So a server can be killed before an answer without a hook in it."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

import msgspec

GREETING_BYTES = 64  # of ZMTP 3
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
PIECE_BYTES = 1 << 16


class FrameProxy:
    """Forwards each connection to *server*, a TCP endpoint; a connection ends with that behind it. Messages of clients
    go on whole. Threads of its own; `close` ends them."""

    def __init__(self, server: str) -> None:
        host, _, port = server.removeprefix("tcp://").rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._operation: int | None = None
        self._deed: Callable[[], None] = lambda: None
        self.has_tripped = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, operation: int, deed: Callable[[], None]) -> None:
        """Do *deed* before the next request of this operation goes on, once."""
        with self._lock:
            self.has_tripped.clear()
            self._operation, self._deed = operation, deed

    def close(self) -> None:
        """End every connection and stop listening."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            _end(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._server)
                except OSError:  # nobody listens
                    client.close()
                    continue
                with self._lock:
                    self._open |= {client, server}
                for connection in (client, server):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for work in (self._forward_requests, self._forward_answers):
                    threading.Thread(target=work, args=(client, server), daemon=True).start()

    def _forward_requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            for data, operation in messages_of(client):
                self._do_if_armed(operation)
                server.sendall(data)
        self._end_both(client, server)

    def _forward_answers(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(PIECE_BYTES):
                client.sendall(data)
        self._end_both(client, server)

    def _do_if_armed(self, operation: object) -> None:
        with self._lock:
            if operation is None or operation != self._operation:
                return
            self._operation, deed = None, self._deed
        deed()
        self.has_tripped.set()

    def _end_both(self, client: socket.socket, server: socket.socket) -> None:
        for connection in (client, server):
            _end(connection)
        with self._lock:
            self._open -= {client, server}


def messages_of(client: socket.socket) -> Iterator[tuple[bytes, object]]:
    """What a DEALER sends, piece by piece: its greeting and commands as they come, and each message whole, with its
    second frame, decoded: the operation. OSError if it stops in the middle."""
    greeting_left = GREETING_BYTES
    while greeting_left:
        data = client.recv(greeting_left)
        if not data:
            return
        greeting_left -= len(data)
        yield data, None
    stream = client.makefile("rb")
    message, frames = b"", []
    while head := stream.read(2):
        if head[0] & LONG:
            head += _exactly(stream.read, 7)
        body = _exactly(stream.read, int.from_bytes(head[1:], "big"))
        if head[0] & COMMAND:
            yield head + body, None
            continue
        message += head + body
        frames.append(body)
        if not head[0] & MORE:
            yield message, _operation(frames)
            message, frames = b"", []


def _exactly(read: Callable[[int], bytes], num_bytes: int) -> bytes:
    data = read(num_bytes)
    if len(data) < num_bytes:
        raise ConnectionError("the client has ended in the middle of a frame")
    return data


def _operation(frames: list[bytes]) -> object:
    try:
        return msgspec.msgpack.decode(frames[1])
    except (IndexError, msgspec.MsgspecError):
        return None


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
