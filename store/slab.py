"""Slabs: the files that hold the payloads of a store. A slab is divided into slots of one size."""

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtier.store.disk_writes import DiskWrites
from kvtier.store.folder import open_private, sync_folder

PAGE_BYTES = 4096
_MAX_BUFFERS = 512  # per system call; Linux allows 1024
_BUFFERED_BYTES = 1 << 20  # of one system call that writes through the page cache
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_PADDING = memoryview(mmap.mmap(-1, PAGE_BYTES))  # zeros, aligned for O_DIRECT
_NOTHING = memoryview(b"")
_PREFIX = "slab-"
_MAX_FILE_BYTES = 1 << 62
_BOUNCE_BYTES = 1 << 20
_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000  # from <linux/fcntl.h> and <linux/stat.h>
_STATX_BYTES, _STATX_DIO_MEM_ALIGN_AT = 256, 152  # size of struct statx, and the offset of stx_dio_mem_align in it
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
# With the GIL held: mincore takes microseconds, and waiting for the GIL afterwards takes longer.
_mincore = ctypes.PyDLL(None).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class Slot(NamedTuple):
    """Space for one payload: slot *number* (from 0) of the slab whose slots have *num_bytes* (whole pages)."""

    num_bytes: int
    number: int


def num_runs(slots: Sequence[Slot]) -> int:
    """Return the number of runs of neighbouring slots in *slots*, which must be sorted."""
    return 1 + sum(a.num_bytes != b.num_bytes or a.number + 1 != b.number for a, b in pairwise(slots)) if slots else 0


def slot_bytes(value_bytes: int) -> int:
    """Return the slot size for values of *value_bytes*, rounded up to whole pages."""
    return -(-value_bytes // PAGE_BYTES) * PAGE_BYTES


class Slabs:
    """All slabs of a store's folder, one file per slot size. The store's index records which slot each record has.

    Reads may run concurrently with any other call. A read of a slot that is being written returns a mixture of the old
    and the new payload.

    A payload in the page cache is copied from there, at memory speed. Any other payload is read with O_DIRECT, past the
    page cache, because the host tier above the store already caches it. O_DIRECT requires memory with the device's
    alignment (`_alignment`). A read into other memory goes through a small buffer.
    """

    def __init__(self, folder: Path, writes: DiskWrites = DiskWrites.BUFFERED) -> None:
        self._folder = folder
        self.writes = writes
        self._opening = threading.Lock()  # guards the creation of slabs
        self._slabs: dict[int, SlabFile] = {}
        self._num_named = -1  # files whose directory entries are on disk
        for path in _files(folder):
            self._slab(int(path.name.removeprefix(_PREFIX)))

    def write(self, slots: Sequence[Slot], values: Sequence[memoryview]) -> None:
        """Write each value to its slot, with one system call per run of neighbouring slots. Raises OSError.

        Several threads may write at the same time, each to its own slots.
        """
        for slab, first, run in self._runs(slots, values):
            slab.write(first, run)

    def read(self, slots: Sequence[Slot], outs: Sequence[memoryview]) -> None:
        """Fill each buffer in *outs* from its slot. A buffer is at most a slot long. Raises OSError.

        Makes one system call per run of neighbouring slots.
        """
        for slab, first, run in self._runs(slots, outs):
            slab.read(first, run)

    def is_cached(self, slot: Slot) -> bool:
        """Return whether all pages of the slot are in the page cache now."""
        return self._slab(slot.num_bytes).is_cached(slot.number * slot.num_bytes, slot.num_bytes)

    def place(self, slot: Slot) -> tuple[Path, int, int]:
        """Return the file that contains the slot, the slot's offset in it, and its length."""
        return self._folder / f"{_PREFIX}{slot.num_bytes}", slot.number * slot.num_bytes, slot.num_bytes

    def punch(self, *slots: Slot) -> None:
        """Release the disk space of *slots*, with one system call per run of neighbouring slots.

        Writing to a slot allocates its disk space again. Raises OSError if the space cannot be released.
        """
        for slab, first, run in self._runs(slots, [_NOTHING] * len(slots)):
            slab.punch(first, len(run))

    def cut(self, num_slots: Mapping[int, int]) -> None:
        """Truncate the file of each slot size to the number of slots that *num_slots* has for the size. Raises OSError.

        A file whose slot size is not in *num_slots* becomes empty. No cut-off slot may be read at this time.
        """
        for num_bytes, slab in self._slabs.items():
            slab.cut(num_slots.get(num_bytes, 0))

    def sync(self) -> None:
        """Block until everything written so far is on disk."""
        slabs = list(self._slabs.values())
        for slab in slabs:
            slab.sync()
        if self._num_named < len(slabs):
            sync_folder(self._folder)
            self._num_named = len(slabs)

    def file_bytes(self) -> int:
        """Return the disk space that the files take."""
        return sum(slab.file_bytes() for slab in list(self._slabs.values()))

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove the slabs in *folder*, which no store may have open."""
        for path in _files(folder):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files. No read or write may be in progress."""
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()

    def _runs(
        self, slots: Sequence[Slot], buffers: Sequence[memoryview]
    ) -> "Iterator[tuple[SlabFile, int, list[memoryview]]]":
        """Yield for each run of neighbouring slots their slab, the first slot's number, and their buffers."""
        run: list[memoryview] = []
        size = first = after = 0  # of the run: the slots' size, the first slot's number, and the number behind the run
        for (num_bytes, number), buffer in sorted(zip(slots, buffers, strict=True), key=itemgetter(0)):
            if number != after or num_bytes != size or len(run) == _MAX_BUFFERS // 2:
                if run:
                    yield self._slab(size), first, run
                run, size, first = [], num_bytes, number
            run.append(buffer)
            after = number + 1
        if run:
            yield self._slab(size), first, run

    def _slab(self, num_bytes: int) -> "SlabFile":
        slab = self._slabs.get(num_bytes)
        if slab is None:
            with self._opening:
                slab = self._slabs.get(num_bytes)
                if slab is None:
                    path = self._folder / f"{_PREFIX}{num_bytes}"
                    slab = self._slabs[num_bytes] = SlabFile(path, num_bytes, self.writes)
        return slab


class SlabFile:
    """The open file of one slab."""

    def __init__(self, path: Path, num_bytes: int, writes: DiskWrites) -> None:
        self._num_bytes = num_bytes
        self._writes = writes
        self._file = open_private(path, os.O_RDWR | os.O_CREAT)
        self._direct: int | None = None
        with contextlib.suppress(OSError):  # tmpfs, itself a page cache, refuses O_DIRECT
            self._direct = open_private(path, os.O_RDWR | os.O_DIRECT)
        self._alignment = _alignment(self._file)
        self._map: _Mapped | None = None

    def write(self, first: int, values: list[memoryview]) -> None:
        size, at = self._num_bytes, first * self._num_bytes
        buffers = values
        if any(value.nbytes < size for value in values):
            buffers = []
            for value in values:
                buffers.append(value)
                if value.nbytes < size:
                    buffers.append(_PADDING[: size - value.nbytes])
        if at + len(values) * size > _MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"slot {first} is beyond the size limit of a slab's file")
        if self._may_write_direct(first, len(values)):
            try:
                buffers, at = _transfer(self._write_direct, buffers, at)
            except OSError as error:
                if error.errno != errno.EINVAL:  # the memory is not aligned as O_DIRECT requires
                    raise
        if buffers:
            self._lengthen((first + len(values)) * size)
            buffers, _ = _transfer(self._write_buffered, buffers, at)
        if buffers:
            raise OSError(errno.EIO, "a write to a slab made no progress")

    def _may_write_direct(self, first: int, num_slots: int) -> bool:
        """Return whether to bypass the page cache for the slots from *first* on, if the memory is aligned for that.

        Slots that are in the cache are written there, which is faster than to drop their pages.
        """
        if self._writes is DiskWrites.BUFFERED or self._direct is None:
            return False
        ends = (first, first + num_slots - 1)  # the slots between them were probably last written in the same way
        return not any(self.is_cached(number * self._num_bytes, PAGE_BYTES) for number in ends)

    def _lengthen(self, num_bytes: int) -> None:
        """Make the file at least *num_bytes* long, with disk space for the new part. Raises OSError if there is none.

        Without this, writes beyond the end of the file through the page cache take a quarter longer, because each write
        allocates space.
        """
        end = os.fstat(self._file).st_size
        if end < num_bytes and _libc.fallocate(self._file, 0, end, num_bytes - end):
            error = ctypes.get_errno()
            if error not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):  # then the write allocates the space
                raise OSError(error, "no disk space for new slots")

    def _write_direct(self, buffers: list[memoryview], at: int) -> int:
        # A write that stopped within a page continues through the page cache: O_DIRECT needs aligned offsets.
        file = self._direct if self._direct is not None and at % PAGE_BYTES == 0 else self._file
        return os.pwritev(file, buffers, at)

    def _write_buffered(self, buffers: list[memoryview], at: int) -> int:
        """Write the first of *buffers* from offset *at* on, at most `_BUFFERED_BYTES` of them.

        The page cache takes one large page per call if it can. Virtual machines are slow to get pages of 2 MiB.
        """
        some, num_bytes = list[memoryview](), 0
        for buffer in buffers:
            some.append(buffer[: _BUFFERED_BYTES - num_bytes])
            num_bytes += some[-1].nbytes
            if num_bytes == _BUFFERED_BYTES:
                break
        return os.pwritev(self._file, some, at)

    def read(self, first: int, outs: list[memoryview]) -> None:
        at = first * self._num_bytes
        left: list[memoryview] = []
        for out in outs:
            left.append(out)
            if out.nbytes < self._num_bytes:
                left.append(_scratch.ignored[: self._num_bytes - out.nbytes])
        if self._direct is None:
            _fill(self._read_buffered, left, at)
            return
        if self.is_cached(at, PAGE_BYTES):  # then the rest probably is cached too
            left, at = _transfer(self._read_cached, left, at)
        if left:
            is_aligned = all(_is_aligned(buffer, self._alignment) for buffer in left)
            _fill(self._read_direct if is_aligned else self._read_bounced, left, at)

    def punch(self, first: int, num_slots: int) -> None:
        if _libc.fallocate(self._file, _PUNCH_HOLE, first * self._num_bytes, num_slots * self._num_bytes):
            raise OSError(ctypes.get_errno(), "the disk space of slots cannot be released")

    def cut(self, num_slots: int) -> None:
        if os.fstat(self._file).st_size > num_slots * self._num_bytes:
            os.ftruncate(self._file, num_slots * self._num_bytes)

    def file_bytes(self) -> int:
        return os.fstat(self._file).st_blocks * 512

    def sync(self) -> None:
        os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)
        if self._direct is not None:
            os.close(self._direct)

    def is_cached(self, start: int, num_bytes: int) -> bool:
        """Return whether all of these bytes (whole pages) are in the page cache now."""
        mapped = self._map
        if mapped is None or mapped.num_bytes < start + num_bytes:
            size = os.fstat(self._file).st_size
            if size < start + num_bytes:
                return False  # a slot that was never written; the read detects that
            mapped = self._map = _Mapped(self._file, size)
        return mapped.is_cached(start, num_bytes)

    def _read_buffered(self, outs: list[memoryview], at: int) -> int:
        return os.preadv(self._file, outs, at)

    def _read_cached(self, outs: list[memoryview], at: int) -> int:
        """Read from offset *at*, but only bytes that are in the page cache. Return the number of bytes read.

        If the file system cannot read from the page cache alone, also read from the disk.
        """
        try:
            return os.preadv(self._file, outs, at, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:  # some file systems do not support RWF_NOWAIT
                raise
            return os.preadv(self._file, outs, at)

    def _read_direct(self, outs: list[memoryview], at: int) -> int:
        """Read from offset *at* past the page cache into aligned memory. Return the number of bytes read."""
        if self._direct is None or at % PAGE_BYTES:
            # A read that stopped within a page continues through the page cache: O_DIRECT needs aligned offsets.
            return os.preadv(self._file, outs, at)
        return os.preadv(self._direct, outs, at)

    def _read_bounced(self, outs: list[memoryview], at: int) -> int:
        """Read as much as a bounce buffer holds from offset *at* past the page cache, and copy it into *outs*.

        Reading through the page cache instead would evict other files' pages from it, and take longer.
        """
        bounce = _scratch.bounce
        num_read = self._read_direct([bounce[: min(len(bounce), sum(out.nbytes for out in outs))]], at)
        source = np.frombuffer(bounce, np.uint8)
        start = 0
        for out in outs:
            if start >= num_read:
                break
            target = np.frombuffer(out, np.uint8)[: num_read - start]
            np.copyto(target, source[start : start + len(target)])
            start += len(target)
        return num_read


class _Mapped:
    """A slab's file, mapped to find out which of its pages are in the page cache. No page of it is accessed."""

    def __init__(self, file: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)
        self._address: int = np.frombuffer(self._map, np.uint8).__array_interface__["data"][0]

    def is_cached(self, start: int, num_bytes: int) -> bool:
        in_cache = bytearray(num_bytes // PAGE_BYTES)
        vector = (ctypes.c_char * len(in_cache)).from_buffer(in_cache)
        return not _mincore(self._address + start, num_bytes, vector) and 0 not in in_cache


class _Scratch(threading.local):
    """Memory of a thread, aligned to pages: a buffer for reads into unaligned memory, and one for bytes to ignore."""

    def __init__(self) -> None:
        self.bounce = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))
        self.ignored = memoryview(mmap.mmap(-1, PAGE_BYTES))


_scratch = _Scratch()


def _files(folder: Path) -> list[Path]:
    """Return the slabs in *folder*. Files with other names are ignored."""
    return [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]


def _alignment(file: int) -> int:
    """Return the alignment that O_DIRECT requires of memory, as far as the kernel says (statx(2), STATX_DIOALIGN).

    Often 512 or 4 bytes. PAGE_BYTES, which every device accepts, if the kernel does not say.
    """
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(file, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found):
        return PAGE_BYTES
    (mask,) = struct.unpack_from("=I", found, 0)
    (memory,) = struct.unpack_from("=I", found, _STATX_DIO_MEM_ALIGN_AT)
    return memory if mask & _STATX_DIOALIGN and memory else PAGE_BYTES


def _is_aligned(view: memoryview, alignment: int) -> bool:
    """Return whether both ends of *view* are aligned."""
    if view.readonly:
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    else:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return not (view.nbytes % alignment or address % alignment)


def _fill(read: Callable[[list[memoryview], int], int], buffers: list[memoryview], at: int) -> None:
    """Fill all *buffers* from offset *at* on, by calls of *read*. Bytes beyond the end of the file become zeros."""
    for buffer in _transfer(read, buffers, at)[0]:
        np.frombuffer(buffer, np.uint8)[:] = 0


def _transfer(
    act: Callable[[list[memoryview], int], int], buffers: list[memoryview], at: int
) -> tuple[list[memoryview], int]:
    """Read or write all *buffers* from offset *at* on, with as many calls of *act* as needed.

    Returns the buffers that were left when *act* made no more progress, and the offset reached.
    """
    while buffers:
        done = act(buffers, at)
        if done <= 0:
            break
        at += done
        if done == sum([buffer.nbytes for buffer in buffers]):  # the usual case
            return [], at
        first = 0
        while first < len(buffers) and done >= buffers[first].nbytes:
            done -= buffers[first].nbytes
            first += 1
        buffers = buffers[first:]
        if done:
            buffers = [buffers[0][done:], *buffers[1:]]
    return buffers, at
