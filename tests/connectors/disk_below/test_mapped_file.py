"""Which memory another process can map: what is mapped from a file, shared, and nothing else."""

import errno
import mmap
import os
from pathlib import Path

import pytest

from kvtier.connectors.disk_below.mapped_file import open_backing_file
from kvtier.store.process.channel import SharedMemory

PAGE = mmap.PAGESIZE


def mapped(path: Path, num_pages: int, flags: int = mmap.MAP_SHARED, first_page: int = 0) -> memoryview:
    with path.open("a+b") as file:
        file.truncate((first_page + num_pages) * PAGE)
        return memoryview(mmap.mmap(file.fileno(), num_pages * PAGE, flags=flags, offset=first_page * PAGE))


def other_end(shared: SharedMemory) -> mmap.mmap:
    """What another process maps of it."""
    return mmap.mmap(shared.file, shared.num_bytes)


def test_the_file_of_a_shared_mapping_is_the_same_memory(tmp_path: Path) -> None:
    memory = mapped(tmp_path / "a file", 4)
    shared = open_backing_file(memory)
    assert shared is not None
    memory[PAGE] = 7
    there = other_end(shared)
    assert there[PAGE] == 7
    there[PAGE] = 8
    assert memory[PAGE] == 8
    os.close(shared.file)


def test_a_mapping_of_a_part_is_named_from_the_files_beginning(tmp_path: Path) -> None:
    memory = mapped(tmp_path / "file", 2, first_page=3)
    shared = open_backing_file(memory)
    assert shared is not None
    memory[0] = 9
    assert shared.num_bytes == 5 * PAGE
    assert other_end(shared)[3 * PAGE] == 9
    os.close(shared.file)


def test_a_view_of_some_rows_leads_to_the_whole_file(tmp_path: Path) -> None:
    memory = mapped(tmp_path / "file", 4)
    whole, part = open_backing_file(memory), open_backing_file(memory[PAGE + 1 : PAGE + 10])
    assert whole is not None
    assert part is not None
    assert part[1:] == whole[1:]
    os.close(whole.file)
    os.close(part.file)


def test_private_memory_has_no_file(tmp_path: Path) -> None:
    assert open_backing_file(memoryview(bytearray(100 * PAGE))) is None
    assert open_backing_file(memoryview(mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))) is None
    assert open_backing_file(mapped(tmp_path / "file", 2, mmap.MAP_PRIVATE)) is None


def test_another_file_under_the_name_is_not_taken_for_it(tmp_path: Path) -> None:
    memory = mapped(tmp_path / "file", 1)
    memory[0] = 5
    (tmp_path / "file").unlink()
    (tmp_path / "file").write_bytes(bytes(PAGE))
    shared = open_backing_file(memory)
    assert shared is None or other_end(shared)[0] == 5  # root can open the mapping itself


def test_a_file_that_never_had_a_name_is_found_by_its_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    file = os.memfd_create("rows")
    os.ftruncate(file, 2 * PAGE)
    memory = memoryview(mmap.mmap(file, 2 * PAGE))
    open_file = os.open

    def as_no_root(path: str, flags: int) -> int:
        if path.startswith("/proc/self/map_files"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return open_file(path, flags)

    monkeypatch.setattr(os, "open", as_no_root)

    shared = open_backing_file(memory)

    assert shared is not None
    memory[PAGE] = 7
    assert other_end(shared)[PAGE] == 7
    os.close(shared.file)
    os.close(file)
