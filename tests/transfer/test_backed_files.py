"""Memory files get their pages before anybody touches them: a page for which there is no room then is SIGBUS."""

import errno
import mmap
import os
from pathlib import Path

import pytest
from mounts import Mount

from kvtier.transfer import host_slab
from kvtier.transfer.host_slab import HostSlab
from kvtier.transfer.pages import back_file, reserves_all
from kvtier.transfer.segment import Segment

PAGE = mmap.PAGESIZE
UNSUPPORTED = [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL]


def failing(number: int) -> object:
    def fail(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def file_of(path: Path, num_bytes: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(file, num_bytes)
    return file


@pytest.mark.parametrize("can_allocate", [True, False])
def test_a_file_system_without_room_is_told_of_before_a_page_is_touched(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, can_allocate: bool
) -> None:
    file = file_of(mount("-t", "tmpfs", "-o", "size=1m", "tmpfs") / "rows", 2 << 20)
    if not can_allocate:
        monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))

    with pytest.raises(OSError, match="No space left"):
        back_file(file, 0, 2 << 20)

    os.close(file)


@pytest.mark.parametrize("number", UNSUPPORTED)
def test_where_nothing_can_be_allocated_pages_are_written_and_content_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file = file_of(tmp_path / "rows", 4 * PAGE)
    os.pwrite(file, b"content", PAGE)
    monkeypatch.setattr(os, "posix_fallocate", failing(number))

    back_file(file, 0, 4 * PAGE)

    assert os.fstat(file).st_blocks * 512 >= 4 * PAGE
    assert os.pread(file, 4 * PAGE, 0) == bytes(PAGE) + b"content".ljust(PAGE, b"\0") + bytes(2 * PAGE)
    os.close(file)


def test_other_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path / "rows", PAGE)
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOMEM))

    with pytest.raises(OSError, match="Cannot allocate memory"):
        back_file(file, 0, PAGE)

    os.close(file)


def test_a_slab_of_a_kernel_that_reserves_all_memory_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_slab, "reserves_all", lambda: True)
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOMEM))

    with pytest.raises(OSError, match=r"host capacity: cannot allocate 4096 bytes \(Cannot allocate memory\); lower"):
        HostSlab(1, PAGE)


@pytest.mark.parametrize(("content", "expected"), [("0\n", False), ("1\n", False), ("2\n", True), (None, False)])
def test_whether_the_kernel_reserves_all_memory_is_its_setting(
    tmp_path: Path, content: str | None, expected: bool
) -> None:
    if content is not None:
        (tmp_path / "setting").write_text(content)

    assert reserves_all(tmp_path / "setting") is expected


def test_a_segment_without_room_for_what_stands_beside_it_says_how_much_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))

    with pytest.raises(
        OSError, match=r"has \d+ MiB free, but 1 MiB are needed; lower --host-memory, or enlarge it: mount"
    ):
        Segment(1 << 20, tmp_path, num_beside=PAGE)
