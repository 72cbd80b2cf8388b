"""Inherited: file descriptors that systemd passes to this process, such as listening sockets."""

import logging
import os
import socket
from collections.abc import MutableMapping
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

FIRST = 3  # number of the first descriptor that systemd passes
MAX = 64  # descriptors that are taken at most
# Names under which the service manager passes descriptors to a sidecar, and keeps them for the next one.
LMCACHE, ENGINE, HTTP, SEGMENT = "lmcache", "engine", "http", "segment"


class Inherited:
    """The descriptors of `sd_listen_fds_with_names(3)`, by name.

    They come from a socket unit (`FileDescriptorName=`), or from the service's file descriptor store. Each descriptor
    can be taken once. `close` closes the remaining ones. Child processes do not inherit descriptors.
    """

    def __init__(self, environment: MutableMapping[str, str], first: int = FIRST) -> None:
        """Take the descriptors that the variables `LISTEN_*` describe, and remove these variables from *environment*.

        No descriptor is taken if the variables are for another process. *first* is the number of the first descriptor.
        """
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
        """Return the next descriptor of that name, or None if there is none. The caller must close it."""
        files = self._files.get(name)
        return files.pop(0) if files else None

    def take_listener(self, name: str) -> socket.socket | None:
        """Return the next descriptor of that name as a listening stream socket, or None if there is none.

        A descriptor of another kind is closed, with a warning in the log.
        """
        file = self.take(name)
        if file is None:
            return None
        try:
            found = socket.socket(fileno=file)
        except OSError:
            os.close(file)
            log.warning("systemd: the descriptor %r is not a socket, and was closed", name)
            return None
        if found.type == socket.SOCK_STREAM and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return found
        found.close()
        log.warning("systemd: the socket %r is not a listening stream socket, and was closed; use ListenStream=", name)
        return None

    def close(self) -> None:
        """Close the descriptors that were not taken, and log a warning about each."""
        for name, files in self._files.items():
            for file in files:
                log.warning("systemd: the descriptor %r is not used, and was closed", name)
                os.close(file)
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
