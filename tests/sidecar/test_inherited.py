"""Descriptors from the service manager: taken by name, once, and never by a process that they are not for."""

import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.sidecar.inherited import Inherited

MARGIN = 32  # descriptors that other threads of this process may open meanwhile


def is_open(file: int) -> bool:
    return Path(f"/proc/self/fd/{file}").exists()


@pytest.fixture
def first() -> Iterator[int]:
    """A number from which on descriptors are free, whatever this process has open. A test closes what it takes."""
    first = max(int(name) for name in os.listdir("/proc/self/fd")) + MARGIN
    yield first
    assert [file for file in range(first, first + MARGIN) if is_open(file)] == []


def given(first: int, **files: int) -> dict[str, str]:
    """The environment of a process that was passed these; their numbers are not to be used any more."""
    for place, file in enumerate(files.values()):
        # Not dup2: it closes what another object has at that number.
        assert fcntl.fcntl(file, fcntl.F_DUPFD, first + place) == first + place
        os.close(file)
    return {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(files)), "LISTEN_FDNAMES": ":".join(files), "A": "b"}


def test_each_is_taken_once_by_its_name_and_passed_on_to_nobody(first: int) -> None:
    environment = given(first, endpoint=os.memfd_create("x"), other=os.memfd_create("y"))

    with Inherited(environment, first) as inherited:
        assert inherited.take("nothing") is None
        assert inherited.take("other") == first + 1
        assert inherited.take("other") is None
        assert not os.get_inheritable(first + 1)

    assert environment == {"A": "b"}
    assert not is_open(first), "what nobody took is open"
    os.close(first + 1)  # still the taker's


def test_what_is_another_processs_is_left_alone(first: int) -> None:
    environment = given(first, endpoint=os.memfd_create("x")) | {"LISTEN_PID": "1"}

    with Inherited(environment, first) as inherited:
        assert inherited.take("endpoint") is None

    assert environment == {"A": "b"}
    os.close(first)  # still open


@pytest.mark.parametrize("number", ["", "many", "-1"])
def test_a_number_that_is_none_is_no_descriptor(first: int, number: str) -> None:
    with Inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": number}, first) as inherited:
        assert inherited.take("unknown") is None


def test_descriptors_without_names_are_unknown(first: int) -> None:
    environment = given(first, endpoint=os.memfd_create("x"))
    del environment["LISTEN_FDNAMES"]

    with Inherited(environment, first) as inherited:
        assert inherited.take("unknown") == first

    os.close(first)


def test_only_what_listens_for_streams_is_a_listener(first: int, caplog: pytest.LogCaptureFixture) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    files = {
        "file": os.memfd_create("x"),
        "packets": socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach(),
        "silent": socket.socket(socket.AF_INET, socket.SOCK_STREAM).detach(),
        "endpoint": listening.detach(),
    }
    with Inherited(given(first, **files), first) as inherited:
        assert [inherited.take_listener(name) for name in ("file", "packets", "silent")] == [None] * 3
        found = inherited.take_listener("endpoint")
        assert found is not None
        assert found.getsockname() == address
        found.close()

    assert len(caplog.records) == 3
    assert [file for file in range(first, first + 4) if is_open(file)] == []
