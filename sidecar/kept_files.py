"""KeptFiles: sockets and host memory that outlive the sidecar's process, as the service manager keeps them."""

import logging
import socket

from kvtier.sidecar.inherited import ENGINE, HTTP, LMCACHE, SEGMENT, Inherited
from kvtier.sidecar.port import is_at, listen
from kvtier.sidecar.systemd import Systemd
from kvtier.transfer.segment import Segment

log = logging.getLogger(__name__)


class KeptFiles:
    """What the process before this one left, or a socket unit gives, and what this one leaves. A socket is of use only
    where the configuration listens too: this protocol has no keys, and another unit's address may be anywhere."""

    def __init__(self, systemd: Systemd, inherited: Inherited) -> None:
        self._systemd = systemd
        self._inherited = inherited
        self._left = inherited.take(SEGMENT)

    @property
    def left_segment(self) -> int | None:
        """What may be the segment of the process before this one; whoever builds the sidecar takes it or closes it."""
        return self._left

    def listener(self, name: str, url: str) -> socket.socket:
        """The socket that listens at *url*: the one that there is already, or a new one, which is kept. OSError."""
        found = self.given_listener(name, url)
        if found is None:
            found = listen(url)
            self.keep_listener(name, found.fileno())
        return found

    def given_listener(self, name: str, url: str) -> socket.socket | None:
        """The socket of that name, if it listens at *url*; another one is closed, and told."""
        found = self._inherited.take_listener(name)
        if found is None or is_at(found, url):
            return found
        log.warning(
            "systemd: the socket %r listens at %s and not at %s, and was closed", name, found.getsockname(), url
        )
        found.close()
        self._systemd.do_not_keep(name)
        return None

    def keep_listener(self, name: str, file: int) -> None:
        """Have a socket kept that this process has made."""
        self._systemd.keep(name, file)

    def keep_segment(self, segment: Segment) -> None:
        """Have the segment kept, in place of one that was left and not taken over."""
        if segment.is_taken_over:  # not by its number: a new one may have that of one that was of no use
            return
        if self._left is not None:
            self._systemd.do_not_keep(SEGMENT)
        self._systemd.keep(SEGMENT, segment.lock_file)

    def let_go(self) -> None:
        """Have nothing kept: the sidecar ends, and no other comes after it."""
        for name in (LMCACHE, ENGINE, HTTP, SEGMENT):
            self._systemd.do_not_keep(name)
