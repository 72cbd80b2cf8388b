"""SocketProxy: stands between engines and a sidecar's own socket, reads which kind each frame is, and does a deed just
before or after one of them. So a sidecar can be killed at any point of a load or store without a hook in it."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

PIECE_BYTES = 1 << 16
LENGTH_BYTES = 4


class SocketProxy:
    """Forwards each connection at *path* to the *sidecar*'s socket, descriptors too; a connection ends with that behind
    it. What the sidecar has said is held while it is stopped. Threads of its own; `close` ends them."""

    def __init__(self, sidecar: str, path: str) -> None:
        self.path = path
        self._sidecar = sidecar
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._kind = ""
        self._is_after = False
        self._deed: Callable[[], None] = lambda: None
        self._goes_on = threading.Event()
        self._goes_on.set()
        self.has_tripped = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, moment: str, deed: Callable[[], None]) -> None:
        """Do *deed* once: *moment* is "before" or "after" and a kind of frame, such as "before Fetch"."""
        with self._lock:
            when, _, self._kind = moment.partition(" ")
            self._is_after = when == "after"
            self._deed = deed
            self.has_tripped.clear()

    def hold(self) -> None:
        """Let nothing that the sidecar has said go on, as it is stopped."""
        self._goes_on.clear()

    def go_on(self) -> None:
        """Let it go on."""
        self._goes_on.set()

    def close(self) -> None:
        """End every connection and stop listening."""
        self._goes_on.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        Path(self.path).unlink(missing_ok=True)
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
                engine, _ = self._listener.accept()
                sidecar = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    sidecar.connect(self._sidecar)
                except OSError:  # it is gone, and so is what stands for it
                    _end(engine)
                    continue
                with self._lock:
                    self._open |= {engine, sidecar}
                for source, target in ((engine, sidecar), (sidecar, engine)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        held, files = bytearray(), list[int]()
        is_of_sidecar = source.getpeername() == self._sidecar
        with suppress(OSError):
            while True:
                data, found, _, _ = socket.recv_fds(source, PIECE_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    break
                held += data
                files += found
                for frame in _frames(held):
                    self._send(frame, files, target, is_of_sidecar)
                    files = []
        _end(source)
        _end(target)

    def _send(self, frame: bytes, files: list[int], target: socket.socket, is_of_sidecar: bool) -> None:
        kind = msgspec.msgpack.decode(frame[LENGTH_BYTES:])[0]
        deed = self._due(kind)
        if deed is not None and not self._is_after:
            deed()
            self.has_tripped.set()
        if is_of_sidecar:
            self._goes_on.wait()
        try:
            socket.send_fds(target, [frame], files) if files else target.sendall(frame)
        finally:
            for file in files:
                os.close(file)
        if deed is not None and self._is_after:
            deed()
            self.has_tripped.set()

    def _due(self, kind: str) -> Callable[[], None] | None:
        with self._lock:
            if kind != self._kind:
                return None
            self._kind = ""
            return self._deed


def _frames(held: bytearray) -> Iterator[bytes]:
    """The frames that are complete, taken out."""
    while len(held) >= LENGTH_BYTES:
        end = LENGTH_BYTES + int.from_bytes(held[:LENGTH_BYTES], "little")
        if len(held) < end:
            return
        frame = bytes(held[:end])
        del held[:end]
        yield frame


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
