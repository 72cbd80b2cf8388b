"""KeptFiles: sockets and shared memory that systemd keeps from one sidecar process to the next."""

import logging
import socket

from kvtier.sidecar.inherited import ENGINE, HTTP, LMCACHE, SEGMENT, Inherited
from kvtier.sidecar.port import is_at, listen
from kvtier.sidecar.systemd import Systemd
from kvtier.transfer.segment import Segment

log = logging.getLogger(__name__)


class KeptFiles:
    """The sockets and the shared memory that this process gets from systemd, and those that it leaves with systemd.

    A socket from systemd is used only if it listens at the configured address. Otherwise, a socket unit could make
    LMCache's protocol, which has no authentication, reachable from other machines.
    """

    def __init__(self, systemd: Systemd, inherited: Inherited) -> None:
        self._systemd = systemd
        self._inherited = inherited
        self._left = inherited.take(SEGMENT)

    @property
    def left_segment(self) -> int | None:
        """Descriptor of the segment that a previous process may have left. `build_sidecar` reuses it or closes it."""
        return self._left

    def listener(self, name: str, url: str) -> socket.socket:
        """Return the inherited socket *name* if it listens at *url*, or else a new socket that does.

        A new socket is left with systemd for the next process. Raises OSError if it cannot listen at *url*.
        """
        found = self.given_listener(name, url)
        if found is None:
            found = listen(url)
            self.keep_listener(name, found.fileno())
        return found

    def given_listener(self, name: str, url: str) -> socket.socket | None:
        """Return the inherited socket *name* if it listens at *url*, or None.

        If it listens at another address, it is closed, with a warning in the log.
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
        """Make systemd keep a socket of this process for the next one."""
        self._systemd.keep(name, file)

    def keep_segment(self, segment: Segment) -> None:
        """Make systemd keep this segment for the next process, and drop a previous segment that was not reused."""
        if segment.is_taken_over:  # do not compare descriptors: a new segment may have reused the number
            return
        if self._left is not None:
            self._systemd.do_not_keep(SEGMENT)
        self._systemd.keep(SEGMENT, segment.lock_file)

    def let_go(self) -> None:
        """Make systemd drop the sockets and the memory that it keeps for a next sidecar process."""
        for name in (LMCACHE, ENGINE, HTTP, SEGMENT):
            self._systemd.do_not_keep(name)
