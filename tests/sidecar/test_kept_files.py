"""What the service manager is to keep, told to a real datagram socket in its place."""

import fcntl
import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import FakeClock

from kvtier.sidecar.inherited import Inherited
from kvtier.sidecar.kept_files import KeptFiles
from kvtier.sidecar.systemd import Systemd
from kvtier.transfer.segment import Segment, discard_handover

MIB = 1 << 20


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The service manager's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


@pytest.fixture
def systemd(manager: socket.socket) -> Iterator[Systemd]:
    with Systemd({"NOTIFY_SOCKET": manager.getsockname()}, FakeClock()) as made:
        yield made


def told(manager: socket.socket) -> list[tuple[str, int]]:
    """What was told, and how many descriptors came with it."""
    found: list[tuple[str, int]] = []
    while True:
        try:
            data, files, *_ = socket.recv_fds(manager, 4096, 4)
        except BlockingIOError:
            return found
        found.append((data.decode(), len(files)))
        for file in files:
            os.close(file)


def kept_files(systemd: Systemd, left: int) -> KeptFiles:
    """Those of a process that was started with a segment that was left, at this number."""
    environment = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "segment"}
    with Inherited(environment, left) as inherited:
        return KeptFiles(systemd, inherited)


def test_a_segment_that_was_taken_over_is_kept_already(
    systemd: Systemd, manager: socket.socket, tmp_path: Path
) -> None:
    with Segment(MIB, tmp_path) as before:
        before.leave()
        left = os.dup(before.lock_file)
    kept = kept_files(systemd, left)
    with Segment(MIB, tmp_path, left=kept.left_segment) as segment:
        kept.keep_segment(segment)

    assert told(manager) == []


def test_a_new_segment_is_kept_also_where_its_number_is_that_of_the_one_which_was_of_no_use(
    systemd: Systemd, manager: socket.socket, tmp_path: Path
) -> None:
    gc.collect()  # closes files that earlier tests left, so that no lower number becomes free meanwhile
    with Segment(MIB, tmp_path) as before:
        number = before.lock_file  # which the next segment's has too, as the lowest that is free
    useless = os.memfd_create("left")
    assert fcntl.fcntl(useless, fcntl.F_DUPFD, number) == number
    os.close(useless)
    kept = kept_files(systemd, number)
    discard_handover(number)

    with Segment(MIB, tmp_path) as segment:
        assert segment.lock_file == number, "this test does not test what it means to"
        kept.keep_segment(segment)

    assert told(manager) == [("FDSTOREREMOVE=1\nFDNAME=segment", 0), ("FDSTORE=1\nFDNAME=segment", 1)]
