"""`Bed`: a store at capacity and a raw file as large, for one block size, and the ways to write and read them."""

import os
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import ne
from pathlib import Path
from typing import TypeVar

import numpy as np

from bench.rounds import Side, Work
from bench.store.blocks import BATCH_BYTES, REQUEST_BYTES, Blocks, NewBlocks, Slots
from bench.store.ground import BusyThread, DeviceMeter, RawFile, Scale, drop_caches
from bench.store.kinds import Kind, open_store
from kvtier.store.blob_store import BlobStore
from kvtier.store.durability import Durability

T = TypeVar("T")
ReadMany = Callable[[Sequence[bytes], Sequence[memoryview]], T]

AT_ONCE = 4  # requests that read at a time
WRITERS = 3  # puts at a time, as many as the engine has writers


class Bed:
    """The store, raw file and memory that all measurements with one block size share; these run one after another.

    At most one store is open. The constructor fills it past its capacity, so every put of a block evicts one.
    """

    def __init__(self, folder: Path, block_bytes: int, scale: Scale, slots: Slots) -> None:
        self.block_bytes = block_bytes
        self.scale = scale
        self.slots = slots
        self.new = NewBlocks(Blocks(slots), [block_bytes])
        self.meter = DeviceMeter(folder)
        self.busy = BusyThread()
        self._blocks = Blocks(slots)
        self._folder = folder
        self._store: BlobStore | None = None
        self._opened: tuple[Kind, Durability] | None = None
        self._rng = random.Random(0)
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._writers = ThreadPoolExecutor(WRITERS)
        self.raw_file = RawFile(folder / "raw", scale.capacity_bytes, slots)
        for _ in range(2):  # the second time gives the file all pages that it will need
            self.turn_over(Kind.INLINE)
        os.sync()

    def open(self, kind: Kind, level: Durability = Durability.PROCESS) -> BlobStore:
        """The store of this *kind* and *level*, opened unless it is the open one."""
        if self._store is None or self._opened != (kind, level):
            self.close_store()
            self._store = open_store(kind, level, self._folder / "store", self.scale.capacity_bytes, self.slots)
            self._opened = kind, level
        return self._store

    def close_store(self) -> None:
        """Close the store, so that its file can leave the page cache: mapped pages stay."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def close(self) -> None:
        """Close the store and the raw file, and end all threads. The files stay on disk."""
        self.close_store()
        self.raw_file.close()
        self.busy.close()
        self._pool.shutdown()
        self._writers.shutdown()

    def beside(self, side: Side, name: str) -> Side:
        """*side* beside a thread that computes in Python."""

        def prepare() -> Work:
            work = side.prepare()
            self.busy.begin()
            return work

        def after() -> None:
            self.busy.pause()
            side.after()

        return Side(name, prepare, after)

    def turn_over(self, kind: Kind, level: Durability = Durability.PROCESS) -> None:
        """Overwrite store and raw file: their pages are then in memory, dirty, and in the page tables of the store."""
        store = self.open(kind, level)
        for _ in range(0, self.scale.capacity_bytes, BATCH_BYTES):
            self.new.batch().put(store)
            self.raw_file.write(self.new.batch().raws)

    def writing(self, store: BlobStore, num_batches: int = 1, digests_ready: bool = False, at_once: int = 1) -> Side:
        """Puts *num_batches* of new blocks, *at_once* at a time; computes their digests too unless *digests_ready*."""

        def prepare() -> Work:
            batches = [self.new.batch() for _ in range(num_batches)]
            if digests_ready:
                return in_turn([partial(store.put_many, batch.blobs()) for batch in batches])
            works = [partial(batch.put, store, at_once) for batch in batches]
            return in_turn(works) if at_once == 1 else lambda: list(self._writers.map(lambda work: work(), works))

        return Side("kvtier", prepare)

    def writing_raw(self, num_batches: int = 1, durable: bool = False) -> Side:
        """Writes *num_batches* of new blocks to the raw file."""

        def prepare() -> Work:
            batches = [self.new.batch() for _ in range(num_batches)]
            return in_turn([partial(self.raw_file.write, batch.raws, durable) for batch in batches])

        return Side("raw", prepare)

    def cold(self, prepare: Callable[[], Work]) -> Side:
        """The work that *prepare* makes, after the store was closed and no file is in memory."""

        def prepare_cold() -> Work:
            self.close_store()
            drop_caches(self._folder, self.scale)
            return prepare()

        return Side("kvtier", prepare_cold)

    def metered(self, side: Side) -> Side:
        """*side*; `meter` counts what the device reads and writes meanwhile."""

        def prepare() -> Work:
            work = side.prepare()
            self.meter.begin()
            return work

        def after() -> None:
            self.meter.end()
            side.after()

        return Side(side.name, prepare, after)

    def reading(self, kind: Kind, num_bytes: int, at_once: int = 1) -> Side:
        """Reads scattered blocks, chosen anew each time, by *at_once* requests at a time."""
        blocks = apart(self.open(kind).keys())
        return Side("kvtier", lambda: self._read(self.open(kind), self.some(blocks, num_bytes), at_once))

    def reading_cold(self, kind: Kind, num_bytes: int, at_once: int = 1, is_scattered: bool = False) -> Side:
        """Reads prompts, each of which was put as one batch, or scattered blocks; no file of the store is in memory."""
        keys = list(self.open(kind).keys())
        prompts = apart(keys) if is_scattered else self.prompts(keys)
        return self.cold(lambda: self._read(self.open(kind), self.some(prompts, num_bytes), at_once))

    def read_everything(self, kind: Kind) -> None:
        """Read the whole store, so that all of it is in memory."""
        keys, step = list(self.open(kind).keys()), self._count(self.scale.hot_bytes)
        for start in range(0, len(keys), step):
            self._read(self.open(kind), keys[start : start + step], 1)()

    def reading_direct(self, num_bytes: int, is_scattered: bool = False) -> Side:
        """Reads *num_bytes* of the raw file past the page cache: runs of a batch's length, or scattered blocks."""
        run = 1 if is_scattered else BATCH_BYTES // self.block_bytes
        outs = self.slots.outs(self.block_bytes, self._count(num_bytes))

        def prepare() -> Work:
            starts = self._rng.sample(range(0, self._count(self.scale.capacity_bytes), run), len(outs) // run)
            offsets = [i * self.block_bytes for start in starts for i in range(start, start + run)]
            return partial(self.raw_file.read_direct, offsets, outs)

        return Side("raw", self.cold(prepare).prepare)

    def copying(self, num_bytes: int) -> Side:
        """Copies *num_bytes* of scattered blocks from memory to memory."""
        num_blocks = self._count(num_bytes)
        outs = [np.frombuffer(out, np.uint8) for out in self.slots.outs(self.block_bytes, num_blocks)]
        slots_in_source = range(self.slots.source_bytes // self.block_bytes)

        def prepare() -> Work:
            starts = [i * self.block_bytes for i in self._rng.choices(slots_in_source, k=num_blocks)]
            sources = [np.frombuffer(self.slots.source(start, self.block_bytes), np.uint8) for start in starts]

            def copy() -> None:
                for out, source in zip(outs, sources, strict=True):
                    np.copyto(out, source)

            return copy

        return Side("raw", prepare)

    def prompts(self, keys: Iterable[bytes]) -> list[list[bytes]]:
        """The batches that are complete in the store, each in the order of its prompt."""
        length = BATCH_BYTES // self.block_bytes
        prompts: dict[int, list[bytes]] = {}
        for key in sorted(keys, key=self._blocks.number):
            prompts.setdefault(self._blocks.number(key) // length, []).append(key)
        return [prompt for prompt in prompts.values() if len(prompt) == length]

    def some(self, prompts: Sequence[Sequence[bytes]], num_bytes: int) -> list[bytes]:
        """Keys of randomly chosen *prompts*, *num_bytes* in all."""
        num_prompts = self._count(num_bytes) // len(prompts[0])
        return [key for prompt in self._rng.sample(prompts, num_prompts) for key in prompt]

    def _count(self, num_bytes: int) -> int:
        return num_bytes // self.block_bytes

    def _read(self, store: BlobStore, keys: Sequence[bytes], at_once: int) -> Work:
        digests = [self._blocks.digest_of(key) for key in keys]
        work = self.requests(store.read_many, keys, at_once)

        def read() -> None:
            found = [result for results in work() for result in results]
            assert found == digests, f"{sum(map(ne, found, digests))} of {len(keys)} blocks were not read"

        return read

    def requests(self, read_many: ReadMany[T], keys: Sequence[bytes], at_once: int) -> Callable[[], list[T]]:
        """Work that reads all *keys*: `REQUEST_BYTES` by each call of *read_many*, *at_once* calls at a time."""
        outs = self.slots.outs(self.block_bytes, len(keys))
        step = max(1, REQUEST_BYTES // self.block_bytes)
        calls = [partial(read_many, keys[i : i + step], outs[i : i + step]) for i in range(0, len(keys), step)]
        if at_once == 1:
            return lambda: [call() for call in calls]
        return lambda: list(self._pool.map(lambda call: call(), calls))


def in_turn(works: Sequence[Work]) -> Work:
    """Work that does all *works*, one after another."""
    return lambda: [work() for work in works]


def apart(keys: Iterable[bytes]) -> list[list[bytes]]:
    """Each of *keys* as a prompt of one block."""
    return [[key] for key in keys]
