"""A mark is read whatever single bit of it has flipped, and says what was written."""

from pathlib import Path

import pytest

from kvtier.store.lmdb.boot_mark import BootMark, FileState, current_boot_id

MARK = BootMark(current_boot_id(), FileState.INTERVAL, num_crashes=1)


@pytest.mark.long
def test_no_flipped_bit_changes_what_is_read(tmp_path: Path) -> None:
    MARK.write(tmp_path)
    written = (tmp_path / "boot_mark").read_bytes()

    for place in range(len(written)):
        for bit in range(8) if written[place] != ord(" ") else (0,):
            flipped = bytearray(written)
            flipped[place] ^= 1 << bit
            (tmp_path / "boot_mark").write_bytes(flipped)
            assert BootMark.read(tmp_path) == MARK, (place, bit)


@pytest.mark.parametrize("num_bytes", [0, 1, 60, 511, 512, 4096, 4607])
def test_one_cut_short_is_read_as_far_as_a_copy_is_whole(tmp_path: Path, num_bytes: int) -> None:
    MARK.write(tmp_path)
    with (tmp_path / "boot_mark").open("r+b") as file:
        file.truncate(num_bytes)

    assert BootMark.read(tmp_path) == (MARK if num_bytes >= 511 else None)


def test_one_with_both_copies_damaged_is_none(tmp_path: Path) -> None:
    MARK.write(tmp_path)
    damaged = bytearray((tmp_path / "boot_mark").read_bytes())
    damaged[20] ^= 1
    damaged[4096 + 20] ^= 1
    (tmp_path / "boot_mark").write_bytes(damaged)

    assert BootMark.read(tmp_path) is None


def test_one_is_written_over_without_new_room(tmp_path: Path) -> None:
    MARK.write(tmp_path)
    before = (tmp_path / "boot_mark").stat()

    BootMark("another boot", FileState.CLEAN).write(tmp_path)

    after = (tmp_path / "boot_mark").stat()
    assert (after.st_ino, after.st_size, after.st_blocks) == (before.st_ino, before.st_size, before.st_blocks)
    assert BootMark.read(tmp_path) == BootMark("another boot", FileState.CLEAN)
