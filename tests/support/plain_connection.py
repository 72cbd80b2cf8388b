"""A connection to a bed's endpoint whose bytes are said one by one."""

import contextlib
import socket

from lmcache_bed import Bed
from zmtp_bytes import HANDSHAKE


class Plain:
    """A connection whose bytes are said one by one."""

    def __init__(self, bed: Bed, first: bytes = HANDSHAKE) -> None:
        self.bed = bed
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(bed.url.removeprefix("ipc://"))
        self.socket.setblocking(False)
        self.send(first)

    def send(self, data: bytes) -> None:
        """All of it, as fast as it is read; ConnectionError if the connection ends."""
        view = memoryview(data)
        while view:
            with contextlib.suppress(BlockingIOError):
                view = view[self.socket.send(view) :]
            self.bed.turn()

    def read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            data += self.bed.until(self._some)
        return data

    def is_ended(self) -> bool:
        """Whether the other side has ended the connection."""

        def ended() -> bool | None:
            try:
                return True if not self.socket.recv(1 << 16) else None
            except BlockingIOError:
                return None
            except ConnectionError:
                return True

        return bool(self.bed.until(ended))

    def _some(self) -> bytes | None:
        try:
            return self.socket.recv(1 << 16)
        except BlockingIOError:
            return None
