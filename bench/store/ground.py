"""What stores are measured with: a raw file, a cold page cache, a busy thread, the device's own counters."""

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from bench.report import arguments
from bench.rounds import MIB
from bench.store.blocks import BATCH_BYTES, BLOCK_SIZES, Slots

QUEUE_DEPTH = 8
DIRECT_WRITERS = 4
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Scale:
    """Sizes and counts of the measurements."""

    capacity_bytes: int = 768 * MIB  # of store and raw file: all of both can be dirty before the kernel writes any
    source_bytes: int = 256 * MIB  # 8 times the third-level cache of the machine this was written on
    cold_bytes: int = 256 * MIB  # that one measurement reads cold
    hot_bytes: int = 128 * MIB  # that one measurement reads from the page cache
    rounds: int = 9
    batches: int = 16  # that a round writes
    many_records: int = 1_000_000
    few_records: int = 10_000
    turnovers: int = 20
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    opening_rounds: int = 9  # or `rounds`, if these are more
    is_alone: bool = True  # on the machine: all of its page cache may be dropped


QUICK = Scale(64 * MIB, 32 * MIB, 16 * MIB, 16 * MIB, 2, 2, 20_000, 10_000, 3, (MIB,), 2, is_alone=False)


def store_arguments(question: str) -> ArgumentParser:
    """A parser with the options of both benchmarks of the store."""
    parser = arguments(question)
    parser.add_argument("--only", default="", metavar="BEGINNING", help="only the rows whose names begin like this")
    parser.add_argument(
        "--folder", type=Path, help="where to work, on the disk to be measured; keeps the stores to open"
    )
    parser.add_argument("--rounds", type=int, help=f"of each measurement ({Scale.rounds}); 7 at least")
    return parser


def scale_of(options: Namespace) -> Scale:
    """The scale that the options ask for."""
    scale: Scale = options.effort.of(Scale(), QUICK)
    return scale if options.rounds is None else replace(scale, rounds=max(options.effort.of(7, 2), options.rounds))


class RawFile:
    """One preallocated file, every byte of it written: the baseline of what disk and kernel can do."""

    def __init__(self, path: Path, num_bytes: int, slots: Slots) -> None:
        self._num_bytes = num_bytes
        self._next = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self._fd, 0, num_bytes)
        for start in range(0, num_bytes, BATCH_BYTES):
            self.write([slots.source(start % slots.source_bytes, BATCH_BYTES)])
        os.fsync(self._fd)
        self._direct = os.open(path, os.O_RDWR | os.O_DIRECT)
        self._pool = ThreadPoolExecutor(QUEUE_DEPTH)
        self._writers = ThreadPoolExecutor(DIRECT_WRITERS)

    def write(self, raws: Sequence[memoryview], durable: bool = False) -> None:
        """Overwrite the next bytes of the file by one call; behind its end it begins again."""
        _write(self._fd, raws, self._take(raws))
        if durable:
            os.fdatasync(self._fd)

    def write_direct(self, raws: Sequence[memoryview]) -> None:
        """Overwrite the next bytes past the page cache, by `DIRECT_WRITERS` calls at a time; *raws* are of one size."""
        start, size = self._take(raws), -(-len(raws) // DIRECT_WRITERS)
        size = min(size, max(1, BATCH_BYTES // raws[0].nbytes))

        def write(first: int) -> None:
            _write(self._direct, raws[first : first + size], start + first * raws[0].nbytes)

        list(self._writers.map(write, range(0, len(raws), size)))

    def last(self, num_bytes: int) -> int:
        """The offset of the *num_bytes* that were written last."""
        return self._next - num_bytes

    def read(self, offset: int, outs: Sequence[memoryview], num_threads: int = 1) -> None:
        """Read *outs*, of one size, from *offset* on by one call per thread, from the page cache if they are cached."""
        self._read(self._fd, offset, outs, num_threads)

    def read_run_direct(self, offset: int, outs: Sequence[memoryview]) -> None:
        """Read the same past the page cache, by `QUEUE_DEPTH` calls at a time."""
        self._read(self._direct, offset, outs, QUEUE_DEPTH)

    def read_direct(self, offsets: Sequence[int], outs: Sequence[memoryview]) -> None:
        """Read past the page cache, by `QUEUE_DEPTH` calls at a time."""

        def read(first: int) -> None:
            for offset, out in zip(offsets[first::QUEUE_DEPTH], outs[first::QUEUE_DEPTH], strict=True):
                num_read = os.preadv(self._direct, [out], offset)
                assert num_read == out.nbytes, f"{num_read} of {out.nbytes} bytes read"

        list(self._pool.map(read, range(QUEUE_DEPTH)))

    def close(self) -> None:
        """Close the file, which stays on disk."""
        self._pool.shutdown()
        self._writers.shutdown()
        os.close(self._fd)
        os.close(self._direct)

    def _take(self, raws: Sequence[memoryview]) -> int:
        num_bytes = sum(raw.nbytes for raw in raws)
        start = 0 if self._next + num_bytes > self._num_bytes else self._next
        self._next = start + num_bytes
        return start

    def _read(self, file: int, offset: int, outs: Sequence[memoryview], num_threads: int) -> None:
        size = -(-len(outs) // num_threads)

        def read(first: int) -> None:
            part = outs[first : first + size]
            num_read = os.preadv(file, part, offset + first * outs[0].nbytes)
            assert num_read == len(part) * outs[0].nbytes, f"{num_read} bytes read of {len(part)} blocks"

        if num_threads == 1:
            read(0)
        else:
            list(self._pool.map(read, range(0, len(outs), size)))


def _write(file: int, raws: Sequence[memoryview], offset: int) -> None:
    num_bytes = sum(raw.nbytes for raw in raws)
    written = os.pwritev(file, raws, offset)
    assert written == num_bytes, f"{written} of {num_bytes} bytes written"


class BusyThread:
    """Another thread of this process that computes in Python between `begin` and `pause`."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self._idle = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="busy", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Have the thread compute; returns when it does."""
        self._go.set()
        while self._idle.is_set():
            time.sleep(0.001)

    def pause(self) -> None:
        """Have the thread pause; returns when it computes no more."""
        self._go.clear()
        self._idle.wait()

    def close(self) -> None:
        """End the thread."""
        self._ended = True
        self._go.set()
        self._thread.join()

    def _run(self) -> None:
        value = 1
        while not self._ended:
            if not self._go.is_set():
                self._idle.set()
                self._go.wait()
                self._idle.clear()
            for _ in range(1000):
                value = value * 3 % 1_000_003


@dataclass
class DeviceMeter:
    """Counts bytes that the device under *folder* reads and writes between `begin` and `end`, for any process."""

    folder: Path
    read_bytes: int = 0
    written_bytes: int = 0
    _before: tuple[int, int] = field(default=(0, 0), repr=False)

    def reset(self) -> None:
        """Set both counts to 0."""
        self.read_bytes = self.written_bytes = 0

    def begin(self) -> None:
        """Begin to count."""
        self._before = self._counts()

    def end(self) -> None:
        """Add the bytes since `begin` to the counts."""
        after = self._counts()
        self.read_bytes += after[0] - self._before[0]
        self.written_bytes += after[1] - self._before[1]

    def _counts(self) -> tuple[int, int]:
        device = self.folder.stat().st_dev
        try:
            fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
        except OSError:  # no block device: the counts stay 0
            return 0, 0
        return int(fields[2]) * 512, int(fields[6]) * 512  # Documentation/block/stat.rst: sectors, always of 512


def drop_caches(folder: Path, scale: Scale) -> str:
    """Drop the files in *folder*, which no process has mapped, from memory; return how that was done."""
    if not scale.is_alone:
        return drop_files(folder)
    os.sync()
    try:
        _DROP_CACHES.write_text("3")
    except OSError:
        return f"{drop_files(folder)} (drop_caches is not permitted)"
    return "drop_caches"


def drop_files(folder: Path) -> str:
    """Write the files in *folder* back and drop them from memory, as far as they are not mapped; return how."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fdatasync(file)  # pages that are to be written stay in memory
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
    return "posix_fadvise DONTNEED"


@contextmanager
def working_folder(chosen: Path | None) -> Iterator[Path]:
    """A new folder in *chosen* or the folder for temporary files; removed at the end, and on Ctrl-C and SIGTERM."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=chosen))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_STARTED = time.monotonic()


def note(what: str) -> None:
    """Print progress to stderr."""
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {what}", file=sys.stderr, flush=True)
