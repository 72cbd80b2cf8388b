"""Systemd: notifies the service manager of the sidecar's state, and gives it descriptors to keep for the next start."""

import logging
import os
import socket
from array import array
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

MIN_WATCHDOG_S = 2.0  # minimum timeout, because the sidecar's thread notifies only about twice a second


class Systemd:
    """A client of `sd_notify(3)`, which sends datagrams to the socket that `NOTIFY_SOCKET` names.

    If that environment variable is not set, nothing is sent. No call blocks. Owned by the thread that owns the tiers,
    so systemd's watchdog notices when that thread is stuck.
    """

    def __init__(self, environment: Mapping[str, str], clock: Callable[[], float]) -> None:
        """Open the socket.

        Raises ValueError if `NOTIFY_SOCKET` is invalid, or if the watchdog's timeout is so short that systemd would end
        a healthy sidecar.
        """
        self._clock = clock
        self._socket: socket.socket | None = None
        self._is_ready = False
        self._alive_at = float("-inf")
        self._period_s = _watchdog_s(environment) / 2
        name = environment.get("NOTIFY_SOCKET", "")
        if not name:
            return
        if name[0] not in "/@":
            raise ValueError(f"NOTIFY_SOCKET {name}: use a path, or an abstract name that begins with @")
        self._address = "\0" + name[1:] if name[0] == "@" else name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def ready(self) -> None:
        """Notify systemd that engines may attach. Only the first call sends this."""
        if not self._is_ready:
            self._is_ready = self._tell("READY=1")

    def alive(self) -> None:
        """Notify systemd's watchdog that the calling thread is not stuck, at most twice per watchdog timeout."""
        now = self._clock()
        if self._period_s and now - self._alive_at >= self._period_s and self._tell("WATCHDOG=1"):
            self._alive_at = now

    def stopping(self) -> None:
        """Notify systemd that the sidecar has begun to shut down."""
        self._tell("STOPPING=1")

    def keep(self, name: str, file: int) -> None:
        """Ask the service manager to keep the descriptor *file* under *name* for the next start of the service.

        The unit's `FileDescriptorStoreMax` limits how many descriptors the service manager keeps.
        """
        self._tell(f"FDSTORE=1\nFDNAME={name}", file)

    def do_not_keep(self, name: str) -> None:
        """Ask the service manager to close the descriptors that it keeps under *name*."""
        self._tell(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def close(self) -> None:
        """Close the socket. Later calls send nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _tell(self, state: str, *files: int) -> bool:
        """Send *state* and the descriptors *files*. Returns False if sending failed."""
        if self._socket is None:
            return True
        try:
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))] if files else []
            self._socket.sendmsg([state.encode()], passed, 0, self._address)
        except OSError as error:
            log.debug("systemd: %s could not be sent (%s)", state, error)
            return False
        return True


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """Return systemd's watchdog timeout in seconds; 0 without a watchdog. Raises ValueError if it is too short."""
    text = environment.get("WATCHDOG_USEC", "")
    if not text or environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    seconds = int(text) / 1e6 if text.isdecimal() else 0.0
    if seconds < MIN_WATCHDOG_S:
        raise ValueError(f"WATCHDOG_USEC {text}: set WatchdogSec={MIN_WATCHDOG_S:g} or more in the systemd unit")
    return seconds
