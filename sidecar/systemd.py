"""Systemd: tells the service manager that the sidecar is ready, lives, or is about to end, and what to keep for it."""

import logging
import os
import socket
from array import array
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

MIN_WATCHDOG_S = 2.0  # the owner's thread looks up twice a second


class Systemd:
    """What `sd_notify(3)` does, with a datagram to the socket that `NOTIFY_SOCKET` names; without one nothing is told.
    No call waits. Owned by the thread that owns the tiers, so that `alive` is not told while that is stuck."""

    def __init__(self, environment: Mapping[str, str], clock: Callable[[], float]) -> None:
        """ValueError, with what to do, for a watchdog that would end a sidecar that lives."""
        self._clock = clock
        self._socket: socket.socket | None = None
        self._is_ready = False
        self._alive_at = float("-inf")
        self._period_s = _watchdog_s(environment) / 2
        name = environment.get("NOTIFY_SOCKET", "")
        if not name:
            return
        if name[0] not in "/@":
            raise ValueError(f"NOTIFY_SOCKET {name}: only a path, or an abstract name that begins with @, can be told")
        self._address = "\0" + name[1:] if name[0] == "@" else name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def ready(self) -> None:
        """Engines may attach; told once."""
        if not self._is_ready:
            self._is_ready = self._tell("READY=1")

    def alive(self) -> None:
        """The owner's thread is not stuck; told twice in the time that the watchdog waits."""
        now = self._clock()
        if self._period_s and now - self._alive_at >= self._period_s and self._tell("WATCHDOG=1"):
            self._alive_at = now

    def stopping(self) -> None:
        """The sidecar ends, which takes a while."""
        self._tell("STOPPING=1")

    def keep(self, name: str, file: int) -> None:
        """Have the service manager keep the descriptor, under this name, for the next start of the service; it does so
        as far as the unit's `FileDescriptorStoreMax` allows."""
        self._tell(f"FDSTORE=1\nFDNAME={name}", file)

    def do_not_keep(self, name: str) -> None:
        """Have it close what it keeps under this name."""
        self._tell(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def close(self) -> None:
        """Tell nothing more."""
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
        """Whether it was told; if not, it is worth another try."""
        if self._socket is None:
            return True
        try:
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))] if files else []
            self._socket.sendmsg([state.encode()], passed, 0, self._address)
        except OSError as error:
            log.debug("systemd: %s was not told (%s)", state, error)
            return False
        return True


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """Seconds after which the service manager ends a service that tells nothing; 0 if it never does."""
    text = environment.get("WATCHDOG_USEC", "")
    if not text or environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    seconds = int(text) / 1e6 if text.isdecimal() else 0.0
    if seconds < MIN_WATCHDOG_S:
        raise ValueError(f"WATCHDOG_USEC {text}: use WatchdogSec={MIN_WATCHDOG_S:g} or more")
    return seconds
