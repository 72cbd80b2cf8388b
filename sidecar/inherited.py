"""Inherited: descriptors that the service manager gave this process: sockets that it listens at, and what was kept."""

import logging
import os
import socket
from collections.abc import MutableMapping
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

FIRST = 3  # the first descriptor that is passed
MAX = 64
LMCACHE, ENGINE, HTTP, SEGMENT = (
    "lmcache",
    "engine",
    "http",
    "segment",
)  # names of what a sidecar is given, and has kept


class Inherited:
    """What `sd_listen_fds_with_names(3)` gives, by name: from a socket unit (`FileDescriptorName=`), and from the
    service's file descriptor store. Each is taken once; what nobody takes is closed at the end, and told. Nothing of it
    is passed on to processes that this one starts."""

    def __init__(self, environment: MutableMapping[str, str], first: int = FIRST) -> None:
        """Takes the variables out of the environment. What is meant for another process is left alone."""
        self._files: dict[str, list[int]] = {}
        pid, number, names = (environment.pop(f"LISTEN_{key}", "") for key in ("PID", "FDS", "FDNAMES"))
        if pid != str(os.getpid()) or not number.isdecimal():
            return
        named = names.split(":") if names else []
        for place in range(min(int(number), MAX)):
            os.set_inheritable(first + place, False)
            name = named[place] if place < len(named) else "unknown"
            self._files.setdefault(name, []).append(first + place)

    def take(self, name: str) -> int | None:
        """The descriptor of that name, which is the caller's from now on; None without one. Of several the first."""
        files = self._files.get(name)
        return files.pop(0) if files else None

    def take_listener(self, name: str) -> socket.socket | None:
        """The same, if it is a stream socket that listens; another one is closed, and told."""
        file = self.take(name)
        if file is None:
            return None
        try:
            found = socket.socket(fileno=file)
        except OSError:
            os.close(file)
            log.warning("systemd: the descriptor %r is no socket, and was closed", name)
            return None
        if found.type == socket.SOCK_STREAM and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return found
        found.close()
        log.warning("systemd: the socket %r does not listen for streams, and was closed", name)
        return None

    def close(self) -> None:
        """Close what nobody has taken."""
        for name, files in self._files.items():
            for file in files:
                log.warning("systemd: a descriptor %r is of no use here, and was closed", name)
                os.close(file)
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
