"""Segment: host memory with a name, which goes with its process."""

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import DEADLINE_S

from kvtier.transfer.segment import Segment

MIB = 1 << 20
OWNER = """
import sys
from pathlib import Path
from kvtier.transfer.segment import Segment
segment = Segment(1 << 20, Path(sys.argv[1]))
print(segment.name, flush=True)
{then}
sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of shared memory, as `/dev/shm` is, that no other test looks into."""
    path = Path("/dev/shm") / f"kvtier-test-{os.getpid()}"
    path.mkdir(mode=0o700)
    yield path
    for file in path.iterdir():
        file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
    path.rmdir()


@contextmanager
def owner(folder: Path, then: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process with a segment, and its name."""
    command = [sys.executable, "-c", OWNER.format(then=then), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_another_process_of_this_user_maps_the_bytes_by_name(folder: Path) -> None:
    with Segment(MIB, folder) as segment:
        segment.memory[5] = 77
        path = folder / segment.name

        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            assert len(mapped) == MIB
            assert mapped[5] == 77
            mapped[6] = 78

        assert segment.memory[6] == 78
        assert path.stat().st_mode & 0o777 == 0o600


def test_all_of_it_is_backed_and_counted(folder: Path) -> None:
    with Segment(40 * MIB, folder) as segment:
        assert segment.wait_backed(DEADLINE_S)
        assert (folder / segment.name).stat().st_blocks * 512 == 40 * MIB == segment.backed_bytes


def test_closing_takes_the_name_away_and_a_second_time_does_nothing(folder: Path) -> None:
    segment = Segment(MIB, folder)

    segment.close()
    segment.close()

    assert names(folder) == []


def test_what_a_killed_process_left_goes_with_the_next_start(folder: Path) -> None:
    with owner(folder) as (process, left):
        process.kill()
        process.wait()
        assert names(folder) == [left]

        with Segment(MIB, folder) as segment:
            assert names(folder) == [segment.name]


def test_the_segment_of_a_process_that_lives_stays(folder: Path) -> None:
    with owner(folder) as (_, living), Segment(MIB, folder) as segment:
        assert names(folder) == sorted([living, segment.name])


def test_a_process_that_was_given_the_descriptor_does_not_keep_the_name(folder: Path) -> None:
    then = """
import subprocess
child = subprocess.Popen(["sleep", "600"], pass_fds=[segment.file], stdin=-3, stdout=-3)
print(child.pid, flush=True)
"""
    with owner(folder, then) as (process, _):
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        process.wait()
        try:
            with Segment(MIB, folder) as segment:
                assert names(folder) == [segment.name]
        finally:
            os.kill(child, signal.SIGKILL)


def test_what_is_no_segment_is_left_alone(folder: Path) -> None:
    prefix = f"kvtier-{os.geteuid()}-"
    target = folder / "target"
    target.write_bytes(b"precious")
    (folder / f"{prefix}link").symlink_to(target)
    (folder / f"{prefix}folder").mkdir()
    os.mkfifo(folder / f"{prefix}pipe")
    (folder / "kvtier-99999-1-00").write_bytes(b"another user's, by its name")
    before = names(folder)

    Segment(MIB, folder).close()

    assert names(folder) == before
    assert target.read_bytes() == b"precious"


def test_more_than_there_is_room_for_is_refused_with_what_to_do(folder: Path) -> None:
    with pytest.raises(OSError, match=r"has \d+ MiB free, but \d+ MiB are needed; lower --host-memory, or enlarge it"):
        Segment(1 << 50, folder)

    assert names(folder) == []
