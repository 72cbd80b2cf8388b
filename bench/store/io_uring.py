"""Would the disk store write faster with io_uring than with threads that call pwritev?

Each round overwrites the next 32 MiB of one file past the page cache, once in every way, in random order. "Threads"
write as the store does, four at a time. "Ring" is one thread with an io_uring: one system call submits all writes and
waits for them. In "runs", a write has up to 8 MiB, as for neighbouring slots. In "blocks", each block is a write, as
for scattered slots. "Registered" means that the memory was registered with the ring (pinned) before. CPU seconds are
those of the whole process, including the kernel's threads that work for the ring.
"""

import ctypes
import mmap
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.report import Row, publish
from bench.rounds import KIB, MIB, Choice, in_words
from bench.store.blocks import BATCH_BYTES, Slots
from bench.store.ground import DIRECT_WRITERS, note, store_arguments, working_folder
from bench.store.store_race import ROUND_BYTES, Took, Turn, raced, speeds, timed

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # numbers of the system calls, the same on all architectures
_SUBMISSIONS, _COMPLETIONS, _ENTRIES = 0, 0x8000000, 0x10000000  # offsets of the ring's three mappings
_WRITEV, _WRITE_FIXED, _WRITE = 2, 5, 23  # operations
_WAIT = 1  # IORING_ENTER_GETEVENTS
_ENTRY = struct.Struct("=BBHiQQIIQHHiQQ")  # opcode, flags, ioprio, fd, offset, address, length, flags, user data, …
_DONE = struct.Struct("=QiI")  # user data, result, flags
_PARAMETERS = struct.Struct("=10I 8IQ 8IQ")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Sizes:
    """Sizes and counts of the measurement."""

    file_bytes: int = 512 * MIB
    source_bytes: int = 256 * MIB
    rounds: int = 31
    block_sizes: tuple[int, ...] = (MIB, 128 * KIB)


QUICK = Sizes(64 * MIB, 64 * MIB, 2, (MIB,))


class Piece(ctypes.Structure):
    """`struct iovec`: memory to write."""

    _fields_ = (("address", ctypes.c_uint64), ("num_bytes", ctypes.c_uint64))


@dataclass(frozen=True)
class Write:
    """Write request: *pieces* of memory that are written one after another, from *offset* in the file on."""

    pieces: Sequence[memoryview]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


class Ring:
    """An io_uring for up to *num_entries* writes at a time to *file*. Raises OSError where the kernel refuses it.

    The bytes to write are in *memory*, at most a GiB. It is registered, so that writes of one piece need not pin it.
    """

    def __init__(self, file: int, num_entries: int, memory: memoryview) -> None:
        self._file = file
        parameters = ctypes.create_string_buffer(_PARAMETERS.size)
        self._ring = _called(_SETUP, num_entries, parameters)
        found = _PARAMETERS.unpack(parameters.raw)
        num_sent, num_done = found[0], found[1]
        _, self._tail, self._mask, _, _, _, array, _, _ = found[10:19]
        self._done_head, self._done_tail, self._done_mask, _, _, self._done, _, _, _ = found[19:28]
        self._sent = mmap.mmap(self._ring, array + 4 * num_sent, offset=_SUBMISSIONS)
        self._completed = mmap.mmap(self._ring, self._done + _DONE.size * num_done, offset=_COMPLETIONS)
        self._entries = mmap.mmap(self._ring, _ENTRY.size * num_sent, offset=_ENTRIES)
        struct.pack_into(f"={num_sent}I", self._sent, array, *range(num_sent))
        _called(_REGISTER, self._ring, 0, _pieces([memory]), 1)

    def write(self, writes: Sequence[Write], is_registered: bool) -> None:
        """Make all *writes* by one system call, and wait for them. Raises OSError if one of them fails."""
        tail, mask = self._word(self._sent, self._tail), self._word(self._sent, self._mask)
        kept: list[object] = []
        for number, write in enumerate(writes):
            if len(write.pieces) > 1:
                pieces = _pieces(write.pieces)
                kept.append(pieces)
                operation, address, length = _WRITEV, ctypes.addressof(pieces), len(pieces)
            else:
                operation = _WRITE_FIXED if is_registered else _WRITE
                address, length = address_of(write.pieces[0]), write.num_bytes
            at = (tail + number & mask) * _ENTRY.size
            _ENTRY.pack_into(
                self._entries, at, operation, 0, 0, self._file, write.offset, address, length, *(0, number), *[0] * 5
            )
        struct.pack_into("=I", self._sent, self._tail, tail + len(writes) & 0xFFFFFFFF)
        _called(_ENTER, self._ring, len(writes), len(writes), _WAIT, None, 0)
        head, done_mask = self._word(self._completed, self._done_head), self._word(self._completed, self._done_mask)
        for at in range(len(writes)):
            place = self._done + _DONE.size * (head + at & done_mask)
            number, num_written, _ = _DONE.unpack_from(self._completed, place)
            if num_written != writes[number].num_bytes:
                raise OSError(max(0, -num_written), f"{num_written} of {writes[number].num_bytes} bytes written")
        struct.pack_into("=I", self._completed, self._done_head, head + len(writes) & 0xFFFFFFFF)

    def close(self) -> None:
        """Close the ring. No write may be in progress."""
        for mapped in (self._sent, self._completed, self._entries):
            mapped.close()
        os.close(self._ring)

    @staticmethod
    def _word(mapped: mmap.mmap, at: int) -> int:
        return int(struct.unpack_from("=I", mapped, at)[0])


class Ways:
    """The ways to write blocks of *block_bytes* to one file. All ways make writes of the same sizes."""

    def __init__(self, folder: Path, block_bytes: int, sizes: Sizes, slots: Slots) -> None:
        self._sizes, self._slots, self._block_bytes = sizes, slots, block_bytes
        self._next = 0
        self._file = os.open(folder / f"file-{block_bytes}", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(self._file, 0, sizes.file_bytes)
        self._pool = ThreadPoolExecutor(DIRECT_WRITERS)
        self._ring: Ring | None = None
        try:
            self._ring = Ring(self._file, ROUND_BYTES // block_bytes, slots.source(0, sizes.source_bytes))
        except OSError as error:
            note(f"no ring: {error}")
        for _ in range(0, sizes.file_bytes, ROUND_BYTES):
            self._threads(self._writes(BATCH_BYTES))  # so that every block of the file has been written once

    def turns(self) -> dict[str, Turn]:
        """Return a turn of each way, without the ways of a ring if the kernel refuses io_uring."""
        run, block, ring = BATCH_BYTES, self._block_bytes, self._ring
        turns: dict[str, Turn] = {
            f"{DIRECT_WRITERS} threads, runs": partial(self._threads_turn, run),
            f"{DIRECT_WRITERS} threads, blocks": partial(self._threads_turn, block),
        }
        if ring is not None:
            turns["ring, runs"] = partial(self._ring_turn, ring, run, is_registered=False)
            turns["ring, blocks"] = partial(self._ring_turn, ring, block, is_registered=False)
            turns["ring, blocks, registered"] = partial(self._ring_turn, ring, block, is_registered=True)
        return turns

    def close(self) -> None:
        """Close file and ring, and end the threads."""
        self._pool.shutdown()
        if self._ring is not None:
            self._ring.close()
        os.close(self._file)

    def _threads_turn(self, num_bytes: int) -> Took:
        writes = self._writes(num_bytes)
        return timed(lambda: self._threads(writes))

    def _ring_turn(self, ring: Ring, num_bytes: int, is_registered: bool) -> Took:
        writes = self._writes(num_bytes)
        return timed(lambda: ring.write(writes, is_registered))

    def _threads(self, writes: Sequence[Write]) -> None:
        def write_one(write: Write) -> None:
            num_written = os.pwritev(self._file, write.pieces, write.offset)
            assert num_written == write.num_bytes, f"{num_written} of {write.num_bytes} bytes written"

        list(self._pool.map(write_one, writes))

    def _writes(self, num_bytes: int) -> list[Write]:
        """Return writes of *num_bytes* each that overwrite the next bytes of the file, and after its end the first."""
        first, self._next = self._next, (self._next + ROUND_BYTES) % self._sizes.file_bytes
        blocks = range(0, num_bytes, self._block_bytes)

        def pieces(start: int) -> list[memoryview]:
            at = start % self._sizes.source_bytes
            # As in host memory, a prompt's blocks are in reverse order: the last one comes first.
            return [self._slots.source(at + block, self._block_bytes) for block in blocks][::-1]

        return [Write(pieces(start), start) for start in range(first, first + ROUND_BYTES, num_bytes)]


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of *view*."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _pieces(views: Sequence[memoryview]) -> "ctypes.Array[Piece]":
    return (Piece * len(views))(*(Piece(address_of(view), view.nbytes) for view in views))


def _called(number: int, *arguments: object) -> int:
    """Make the system call *number*, and return its result. Raises OSError if it fails."""
    found: int = _libc.syscall(number, *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def main() -> None:
    """Measure all ways by block size."""
    options = store_arguments((__doc__ or "").partition("\n")[0]).parse_args()
    sizes: Sizes = options.effort.of(Sizes(), QUICK)
    choice, rows = Choice(options.only), list[Row]()
    with working_folder(options.folder) as folder:
        slots = Slots(sizes.source_bytes, 0)
        for block_bytes in sizes.block_sizes:
            what = f"store, {in_words(block_bytes)}"
            if not choice.has(what):
                continue
            note(what)
            with ExitStack() as stack:
                ways = Ways(folder, block_bytes, sizes, slots)
                stack.callback(ways.close)
                rows += speeds(what, raced(ways.turns(), sizes.rounds), None)
    publish("io_uring", choice.of(rows), options.json)


if __name__ == "__main__":
    main()
