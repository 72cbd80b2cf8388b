"""How much faster is the store than one file per block, which is how the file tiers of vLLM and SGLang keep them?

The peer is favoured: 256 folders are made in advance (vLLM: 4096 x 256, made on the way), files go through the page
cache (vLLM: past it, unless told otherwise; shown without a target), no call checks whether a file exists, none
verifies. The store computes digests and verifies. Both are at capacity: as much is evicted as is written. A batch of
writes has 8 MiB.
"""

import gc
import os
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

from bench.report import Row, publish
from bench.rounds import Choice, Side, Work, alternate, compared, in_words
from bench.store.bed import AT_ONCE, Bed, apart
from bench.store.blocks import BATCH_BYTES, Batch, Slots
from bench.store.ground import Scale, drop_caches, note, scale_of, store_arguments, working_folder
from bench.store.kinds import Kind
from kvtier.store.durability import Durability

T = TypeVar("T")

FILES = "files"
DIRECT = "files, O_DIRECT"
HEX = "0123456789abcdef"


class FilePerBlock:
    """Writes each block to a new file and renames that; deletes the oldest files. Like vLLM's `tiering/fs/io.py`.

    *num_threads* threads share a batch.
    """

    def __init__(self, folder: Path, capacity_bytes: int, num_threads: int = 1) -> None:
        self._folder = str(folder)
        self._free_bytes = capacity_bytes
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads)
        self._files: deque[tuple[bytes, int]] = deque()
        for first in HEX:
            for second in HEX:
                (folder / first / second).mkdir(parents=True)

    def keys(self) -> list[bytes]:
        """The keys, oldest first."""
        return [key for key, _ in self._files]

    def put(self, batch: Batch, durable: bool = False, flags: int = 0) -> None:
        """Write each block of *batch* to its file; *durable* syncs each file and its folder."""
        write = partial(self._write, durable=durable, flags=flags)
        self._do(write, list(zip(batch.keys, batch.raws, strict=True)))
        self._files += [(key, raw.nbytes) for key, raw in zip(batch.keys, batch.raws, strict=True)]
        self._free_bytes -= sum(raw.nbytes for raw in batch.raws)
        evicted: list[bytes] = []
        while self._free_bytes < 0:
            oldest, num_bytes = self._files.popleft()
            evicted.append(oldest)
            self._free_bytes += num_bytes
        self._do(lambda key: os.unlink(self._path(key)), evicted)

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview], flags: int = 0) -> None:
        """Read each file into its *out*."""
        for key, out in zip(keys, outs, strict=True):
            file = os.open(self._path(key), os.O_RDONLY | flags)
            num_read = os.readv(file, [out])
            os.close(file)
            assert num_read == out.nbytes, f"{num_read} of {out.nbytes} bytes read"

    def close(self) -> None:
        """End the threads. The files stay on disk."""
        self._pool.shutdown()

    def _do(self, act: Callable[[T], None], items: Sequence[T]) -> None:
        if self._num_threads == 1:
            for item in items:
                act(item)
        else:
            list(self._pool.map(act, items))

    def _write(self, block: tuple[bytes, memoryview], durable: bool, flags: int) -> None:
        key, raw = block
        path = self._path(key)
        fresh = f"{path}.tmp"
        file = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY | flags, 0o644)
        written = os.write(file, raw)
        if durable:
            os.fsync(file)
        os.close(file)
        assert written == raw.nbytes, f"{written} of {raw.nbytes} bytes written"
        os.replace(fresh, path)
        if durable:
            _sync_folder(os.path.dirname(path))

    def _path(self, key: bytes) -> str:
        name = key[16:].hex()
        return f"{self._folder}/{name[0]}/{name[1]}/{name}.bin"


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(handle)
    os.close(handle)


class Match:
    """A store and one file per block, compared with blocks of one size."""

    def __init__(self, bed: Bed, folder: Path, kind: Kind) -> None:
        self._bed = bed
        self._kind = kind
        folder.mkdir()
        self._files = FilePerBlock(folder, bed.scale.capacity_bytes)
        for _ in range(0, bed.scale.capacity_bytes * 5 // 4, BATCH_BYTES):
            self._files.put(bed.new.batch())

    def writes(self, level: Durability, name: str) -> list[Row]:
        """Compare writes, batch by batch."""
        durable = level is Durability.COMMIT
        scale = self._bed.scale
        self._bed.turn_over(self._kind, level)
        store = self._bed.open(self._kind, level)
        sides = [self._bed.writing(store), self._putting(FILES, durable, 0)]
        if not durable:
            sides.append(self._putting(DIRECT, durable, os.O_DIRECT))
        times = alternate(sides, scale.rounds, scale.batches)
        return self._rows(name, times, scale.batches * BATCH_BYTES, 2)

    def hot_reads(self, at_once: int, name: str) -> list[Row]:
        """Compare reads of scattered blocks from the page cache."""
        num_bytes = self._bed.scale.hot_bytes
        self._bed.read_everything(self._kind)
        keys, step = self._files.keys(), num_bytes // self._bed.block_bytes
        for start in range(0, len(keys), step):
            self._bed.requests(self._files.read_many, keys[start : start + step], 1)()
        blocks = apart(keys)
        reading = partial(self._bed.requests, self._files.read_many, at_once=at_once)
        theirs = Side(FILES, lambda: reading(self._bed.some(blocks, num_bytes)))
        times = alternate([self._bed.reading(self._kind, num_bytes, at_once), theirs], self._bed.scale.rounds)
        return self._rows(name, times, num_bytes, 2)

    def cold_reads(self, at_once: int, name: str) -> list[Row]:
        """Compare cold reads of prompts."""
        num_bytes = self._bed.scale.cold_bytes
        sides = [
            self._bed.reading_cold(self._kind, num_bytes, at_once),
            self._reading_cold(FILES, at_once, 0),
            self._reading_cold(DIRECT, at_once, os.O_DIRECT),
        ]
        return self._rows(name, alternate(sides, self._bed.scale.rounds), num_bytes, 1)

    def _putting(self, name: str, durable: bool, flags: int) -> Side:
        return Side(name, lambda: partial(self._files.put, self._bed.new.batch(), durable, flags))

    def _reading_cold(self, name: str, at_once: int, flags: int) -> Side:
        prompts = self._bed.prompts(self._files.keys())
        read_many = partial(self._files.read_many, flags=flags)

        def prepare() -> Work:
            return self._bed.requests(read_many, self._bed.some(prompts, self._bed.scale.cold_bytes), at_once)

        return Side(name, self._bed.cold(prepare).prepare)

    def _rows(self, name: str, times: dict[str, list[float]], num_bytes: int, minimum: float) -> list[Row]:
        rows: list[Row] = []
        for label, baseline in times.items():
            if label != "kvtier":
                target = minimum if label == FILES else None
                rows += compared(name, times["kvtier"], (label, baseline), num_bytes, target)
        return rows


Case = Callable[[Match, str], list[Row]]


def by_block_size(folder: Path, kind: Kind, scale: Scale, slots: Slots, choice: Choice) -> list[Row]:
    """Compare all cases for each block size."""
    rows: list[Row] = []
    for block_bytes in scale.block_sizes:
        size = in_words(block_bytes)
        cases: dict[str, Case] = {
            f"write, not durable, {size}": lambda match, name: match.writes(Durability.PROCESS, name),
            f"write, durable, {size}": lambda match, name: match.writes(Durability.COMMIT, name),
            f"hot read, {size}, 1 thread": lambda match, name: match.hot_reads(1, name),
            f"hot read, {size}, {AT_ONCE} threads": lambda match, name: match.hot_reads(AT_ONCE, name),
            f"cold read, {size}, 1 thread": lambda match, name: match.cold_reads(1, name),
            f"cold read, {size}, {AT_ONCE} threads": lambda match, name: match.cold_reads(AT_ONCE, name),
        }
        chosen = {name: case for name, case in cases.items() if choice.has(name)}
        if not chosen:
            continue
        note(f"blocks of {size}: filling a store and files")
        place = folder / "bed"
        place.mkdir()
        with closing(Bed(place, block_bytes, scale, slots)) as bed:
            match = Match(bed, place / "files", kind)
            for name, case in chosen.items():
                note(name)
                rows += case(match, name)
        shutil.rmtree(place)
    return rows


def main() -> None:
    """Compare store and files by block size."""
    parser = store_arguments((__doc__ or "").partition("\n")[0])
    parser.add_argument("--kind", type=Kind, default=Kind.INLINE, help="where the store is: inline (default) or child")
    options = parser.parse_args()
    scale, choice = scale_of(options), Choice(options.only)
    gc.freeze()
    with working_folder(options.folder) as folder:
        note(f"cold reads: {drop_caches(folder, scale)}")
        slots = Slots(scale.source_bytes, max(scale.cold_bytes, scale.hot_bytes))
        rows = by_block_size(folder, options.kind, scale, slots, choice)
    publish("store_peers", choice.of(rows), options.json)


if __name__ == "__main__":
    main()
