"""Access to the file behind an engine's shared memory, so that the store's process can map the same memory."""

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from kvtier.store.process.channel import SharedMemory, address_of


class _Mapping(NamedTuple):
    """A line of /proc/self/maps."""

    start: int
    end: int
    is_shared: bool
    offset: int  # in the file
    device: int
    inode: int
    path: str


def open_backing_file(memory: memoryview) -> SharedMemory | None:
    """Open the file from which *memory* is mapped. The caller must close the file descriptor.

    *memory* must be contiguous and writable. Returns None if it is not a shared mapping of a single file, or if the
    file cannot be opened. Then blocks are sent to and from the store's process over a socket.
    """
    address = address_of(memory)
    here = [mapping for mapping in _mappings() if mapping.start < address + memory.nbytes and mapping.end > address]
    if not here or not all(mapping.is_shared and mapping.inode for mapping in here):
        return None
    first = here[0]
    origin = first.start - first.offset
    if any((m.device, m.inode, m.start - m.offset) != (first.device, first.inode, origin) for m in here):
        return None
    file = _open(first)
    return None if file is None else SharedMemory(file, origin, os.fstat(file).st_size, is_backed=False)


def _open(mapping: _Mapping) -> int | None:
    """Return a descriptor of the mapped file, or None if it cannot be opened.

    Tries the file's path, then the descriptors that this process has open, for a file without a path. Tries the entry
    in /proc/self/map_files last, because only root may open it.
    """
    by_descriptor = (f"/proc/self/fd/{number}" for number in _descriptors_of(mapping))
    for path in (mapping.path, *by_descriptor, f"/proc/self/map_files/{mapping.start:x}-{mapping.end:x}"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            found = os.fstat(file)
            if (found.st_dev, found.st_ino) == (mapping.device, mapping.inode):
                return file
            os.close(file)
    return None


def _descriptors_of(mapping: _Mapping) -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor was closed in the meantime
            found = os.fstat(int(number))
            if (found.st_dev, found.st_ino) == (mapping.device, mapping.inode):
                yield number


def _mappings() -> Iterator[_Mapping]:
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, rights, offset, device, inode, *path = line.rstrip("\n").split(maxsplit=5)
            start, end = (int(number, 16) for number in span.split("-"))
            major, minor = (int(number, 16) for number in device.split(":"))
            yield _Mapping(
                start, end, rights.endswith("s"), int(offset, 16), os.makedev(major, minor), int(inode), "".join(path)
            )
