"""What the service manager is told, by a real datagram socket in its place."""

import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import FakeClock

from kvtier.sidecar.systemd import Systemd


class Listener:
    """The service manager's end."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.setblocking(False)

    def told(self) -> list[str]:
        found = []
        try:
            while True:
                found.append(self.socket.recv(4096).decode())
        except BlockingIOError:
            return found


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Listener, str]]:
    """A listener, and what `NOTIFY_SOCKET` says of it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@kvtier-{secrets.token_hex(8)}"
    listener = Listener(name.replace("@", "\0"))
    yield listener, name
    listener.socket.close()


def test_readiness_is_told_once_and_the_end_when_it_begins(manager: tuple[Listener, str]) -> None:
    listener, name = manager
    with Systemd({"NOTIFY_SOCKET": name}, FakeClock()) as systemd:
        systemd.ready()
        systemd.ready()
        systemd.alive()  # there is no watchdog
        systemd.stopping()

    assert listener.told() == ["READY=1", "STOPPING=1"]


def test_what_is_to_be_kept_is_passed_with_its_name(manager: tuple[Listener, str]) -> None:
    listener, name = manager
    file = os.memfd_create("x")
    os.write(file, b"content")
    with Systemd({"NOTIFY_SOCKET": name}, FakeClock()) as systemd:
        systemd.keep("segment", file)
        systemd.do_not_keep("segment")
    os.close(file)

    data, (passed,), *_ = socket.recv_fds(listener.socket, 4096, 4)
    assert data == b"FDSTORE=1\nFDNAME=segment"
    assert os.pread(passed, 100, 0) == b"content"
    os.close(passed)
    assert listener.told() == ["FDSTOREREMOVE=1\nFDNAME=segment"]


def test_the_watchdog_is_told_twice_in_its_time(manager: tuple[Listener, str]) -> None:
    listener, name = manager
    clock = FakeClock()
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}
    with Systemd(environment, clock) as systemd:
        for _ in range(41):  # 20 s, looked at twice a second
            systemd.alive()
            clock.now += 0.5

    assert listener.told() == ["WATCHDOG=1"] * 5


def test_the_watchdog_of_another_process_is_not_ours(manager: tuple[Listener, str]) -> None:
    listener, name = manager
    with Systemd({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}, FakeClock()) as systemd:
        systemd.alive()

    assert listener.told() == []


def test_without_a_service_manager_nothing_is_told_and_nothing_fails() -> None:
    with Systemd({"WATCHDOG_USEC": "10000000"}, FakeClock()) as systemd:
        systemd.ready()
        systemd.alive()
        systemd.stopping()


def test_a_service_manager_that_is_away_for_a_while_is_told_later(tmp_path: Path) -> None:
    with Systemd({"NOTIFY_SOCKET": str(tmp_path / "notify")}, FakeClock()) as systemd:
        systemd.ready()
        listener = Listener(str(tmp_path / "notify"))
        systemd.ready()

    assert listener.told() == ["READY=1"]
    listener.socket.close()


def test_a_service_manager_that_reads_nothing_is_not_waited_for(manager: tuple[Listener, str]) -> None:
    listener, name = manager
    with Systemd({"NOTIFY_SOCKET": name}, FakeClock()) as systemd:
        for _ in range(10_000):
            systemd.stopping()

    assert 0 < len(listener.told()) < 10_000


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NOTIFY_SOCKET": "vsock:2:1"}, "NOTIFY_SOCKET vsock:2:1: use a path"),
        ({"WATCHDOG_USEC": "500000"}, "WATCHDOG_USEC 500000: set WatchdogSec=2 or more"),
        ({"WATCHDOG_USEC": "soon"}, "WATCHDOG_USEC soon: set WatchdogSec=2 or more"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_a_line(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Systemd(environment, FakeClock())
