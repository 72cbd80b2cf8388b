"""KeptFiles: sockets and host memory that outlive the sidecar's process, because the service manager keeps them."""

import logging
import socket

from kvtier.sidecar.inherited import ENGINE, HTTP, LMCACHE, SEGMENT, Inherited
from kvtier.sidecar.port import is_at, listen
from kvtier.sidecar.systemd import Systemd
from kvtier.transfer.segment import Segment

log = logging.getLogger(__name__)


class KeptFiles:
    """Descriptors that the previous process left or a socket unit provides, and those that this process leaves.

    An inherited socket is used only if it listens at the configured address. A socket unit may listen anywhere, and
    LMCache's protocol has no authentication.
    """

    def __init__(self, systemd: Systemd, inherited: Inherited) -> None:
        self._systemd = systemd
        self._inherited = inherited
        self._left = inherited.take(SEGMENT)

    @property
    def left_segment(self) -> int | None:
        """A descriptor that may be the previous process's segment. `build_sidecar` takes it over or closes it."""
        return self._left

    def listener(self, name: str, url: str) -> socket.socket:
        """Return the inherited socket *name* if it listens at *url*, or else a new socket that does.

        The service manager keeps a new socket. Raises OSError if the new socket cannot listen at *url*.
        """
        found = self.given_listener(name, url)
        if found is None:
            found = listen(url)
            self.keep_listener(name, found.fileno())
        return found

    def given_listener(self, name: str, url: str) -> socket.socket | None:
        """Return the inherited socket *name* if it listens at *url*, or None.

        A socket that listens elsewhere is closed and logged.
        """
        found = self._inherited.take_listener(name)
        if found is None or is_at(found, url):
            return found
        log.warning(
            "systemd: the socket %r listens at %s instead of %s, and was closed", name, found.getsockname(), url
        )
        found.close()
        self._systemd.do_not_keep(name)
        return None

    def keep_listener(self, name: str, file: int) -> None:
        """Have the service manager keep a socket that this process has created."""
        self._systemd.keep(name, file)

    def keep_segment(self, segment: Segment) -> None:
        """Have the service manager keep the segment, instead of a previous segment that was not taken over."""
        if segment.is_taken_over:  # do not compare descriptors: a new segment may have reused the number
            return
        if self._left is not None:
            self._systemd.do_not_keep(SEGMENT)
        self._systemd.keep(SEGMENT, segment.lock_file)

    def let_go(self) -> None:
        """Have the service manager keep nothing, because no other process follows."""
        for name in (LMCACHE, ENGINE, HTTP, SEGMENT):
            self._systemd.do_not_keep(name)
