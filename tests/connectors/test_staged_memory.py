"""The shared rows of a staged disk: where they are, and what is said if there is no room for them."""

import errno
import hashlib
import os
from pathlib import Path

import pytest
from mounts import Mount

from kvtier.connectors import staged_disk
from kvtier.connectors.staged_disk import Rows, StagedDisk
from kvtier.engine.config import DiskConfig, tree_from_dict
from kvtier.tiers.naming.block_hash import BlockName

DEADLINE_S = 60.0


@pytest.fixture
def small(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `/dev/shm` with room for 16 MiB."""
    point = mount("-t", "tmpfs", "-o", "size=16m", "tmpfs")
    monkeypatch.setattr(staged_disk, "SHARED_MEMORY", str(point))
    return point


def opened(folder: Path) -> StagedDisk:
    config = tree_from_dict(DiskConfig, {"path": str(folder / "store"), "capacity": "256MiB"}, "disk")
    disk = StagedDisk(config, bytes(16), [1 << 20])
    assert disk.wait_indexed(DEADLINE_S)
    return disk


def store_all(disk: StagedDisk) -> int:
    """How many rows are stored of as many as all shared rows are, and then some."""
    names = [BlockName(hashlib.sha256(bytes([number])).digest()) for number in range(70)]

    def fill(_: range, rows: Rows) -> None:
        rows[:] = 7

    return sum(disk.store(names, None, fill))


def no_memfd(*_: object) -> int:
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_a_small_shared_memory_is_not_needed(small: Path, tmp_path: Path) -> None:
    disk = opened(tmp_path)

    assert store_all(disk) == 70
    assert not [*small.iterdir()]

    disk.close()


def test_without_memory_files_rows_are_in_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_disk, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(os, "memfd_create", no_memfd)
    disk = opened(tmp_path)

    assert store_all(disk) == 70
    assert not [*tmp_path.glob("kvtier-rows-*")]

    disk.close()


def test_too_little_shared_memory_is_an_error_that_says_how_much_is_missing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "memfd_create", no_memfd)

    with pytest.raises(OSError, match=r"cannot allocate 64 MiB of .*, where 16 MiB are free .*--shm-size") as why:
        opened(tmp_path)

    assert "\n" not in str(why.value)
    assert not [*small.iterdir()]


def test_too_little_memory_is_an_error_before_a_row_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", fail)

    with pytest.raises(OSError, match=r"cannot allocate 64 MiB of memory \(Cannot allocate memory\); free some"):
        opened(tmp_path)
