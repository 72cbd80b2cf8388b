"""How close is the store to the raw disk, and is it faster than other stores of KV?

Each round moves 32 MiB of blocks from or to shared memory, every store in turn, in random order; figures are medians,
and ratios are medians of the ratios within the rounds. CPU seconds are of the whole process tree: writing back what the
page cache holds is the kernel's own work, and in no figure. kvtier's store is in a process of its own, at its capacity:
it evicts as much as it stores. The benchmark writes to it like the tiers: 8 MiB a call, three calls at a time. The time
includes computing the digests, and every load is verified. "kvtier" writes past the page cache, as below host memory.
"kvtier, buffered" writes through it, as below LMCache (`disk.writes`), and is compared with the stores that do so too.
"Raw" is one file, overwritten. "Files" is one file per block, by 8 threads through the page cache. LMCache's `fs` and
`fs_native` and Lifeboat Cache are L2 adapters of LMCache in a process of their own; LMCache's never evict, so their
files are deleted outside the time that counts.

Lifeboat Cache is proprietary and no package of ours requires it: `pip install --no-deps --target FOLDER lifeboatcache`,
and give the folder as --lifeboat. Without it, its rows promise nothing.
"""

import gc
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

from foreign.told_script import ToldScript

from bench.report import Row, publish
from bench.rounds import GIB, KIB, MIB, Choice, Work, at_least, at_most, in_words
from bench.store.bed import WRITERS
from bench.store.blocks import BATCH_BYTES, Batch, Blocks, NewBlocks, Slots
from bench.store.flush import HostTier
from bench.store.ground import DIRECT_WRITERS, QUEUE_DEPTH, RawFile, drop_files, note, store_arguments, working_folder
from bench.store.kinds import Kind, open_store
from bench.store.store_peers import FilePerBlock
from kvtier.store.disk_writes import DiskWrites
from kvtier.store.durability import Durability
from kvtier.store.process.store_process import StoreProcess

ROUND_BYTES = 32 * MIB
FILE_THREADS = 8
BUFFERED = "kvtier, buffered"
OURS, RAW, FILES, LIFEBOAT = "kvtier", f"raw O_DIRECT, {DIRECT_WRITERS} threads", "files", "Lifeboat Cache"
RAW_READ, RAW_CACHED = f"raw O_DIRECT, {QUEUE_DEPTH} threads", "raw preadv"
FS, NATIVE, NATIVE_DIRECT = "LMCache fs", "LMCache fs_native", "LMCache fs_native, O_DIRECT"
STORE_TARGETS: Mapping[str, Callable[[int], float]] = {  # how many times as fast as each, by block size
    RAW: lambda block_bytes: 0.75 if block_bytes >= MIB else 0.7,
    FILES: lambda _: 2,
    FS: lambda _: 1.5,
    NATIVE: lambda _: 0.8,
    NATIVE_DIRECT: lambda _: 0.8,
    LIFEBOAT: lambda _: 5,
}
BUFFERED_TARGETS = {other: STORE_TARGETS[other] for other in (FILES, FS, NATIVE, LIFEBOAT)}
MAX_STORE_CPU, MAX_LOAD_CPU = 0.3, 0.25  # seconds per GB


@dataclass(frozen=True)
class Sizes:
    """Sizes and counts of the measurements."""

    capacity_bytes: int = 512 * MIB  # of each store
    source_bytes: int = 256 * MIB
    rounds: int = 15
    host_bytes: int = 4 * GIB  # that a flush writes
    flushes: int = 5
    block_sizes: tuple[int, ...] = (MIB, 128 * KIB)


QUICK = Sizes(96 * MIB, 64 * MIB, 2, 64 * MIB, 2, (MIB,))


@dataclass(frozen=True)
class Took:
    """What a store took for the bytes of a round."""

    seconds: float
    cpu_s: float


Turn = Callable[[], Took]
"""One turn of a store: it prepares, moves the bytes of a round, and returns what moving them took."""


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads that process *pid* has had."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock of clock_getcpuclockid(3)


def timed(work: Work, *pids: int) -> Took:
    """Do *work*; return what it took, with the CPU seconds of this process and of the processes *pids*."""
    everyone = (os.getpid(), *pids)
    gc.disable()
    cpu_before, began_at = sum(map(cpu_s, everyone)), time.perf_counter()
    work()
    took = Took(time.perf_counter() - began_at, sum(map(cpu_s, everyone)) - cpu_before)
    gc.enable()
    return took


def raced(turns: Mapping[str, Turn], num_rounds: int) -> dict[str, list[Took]]:
    """Return what each store took in each round. A first round is left out."""
    rng = random.Random(0)
    took: dict[str, list[Took]] = {name: [] for name in turns}
    for _ in range(num_rounds + 1):
        for name in rng.sample(list(turns), len(turns)):
            took[name].append(turns[name]())
    return {name: each[1:] for name, each in took.items()}


class Stores:
    """kvtier's store in both modes, a raw file and one file per block, each of `sizes.capacity_bytes` and full."""

    def __init__(self, folder: Path, block_bytes: int, sizes: Sizes, slots: Slots) -> None:
        self._sizes, self._slots, self._block_bytes = sizes, slots, block_bytes
        self._folder = folder / "ours"
        self._folder.mkdir(parents=True)
        (folder / FILES).mkdir()
        self._new = NewBlocks(Blocks(slots), [block_bytes])
        self._rng = random.Random(0)
        self._pool = ThreadPoolExecutor(WRITERS)
        self._raw = RawFile(self._folder / "raw", sizes.capacity_bytes, slots)
        self._files = FilePerBlock(folder / FILES, sizes.capacity_bytes, FILE_THREADS)
        self._store = self._opened(self._folder / "store", DiskWrites.DIRECT)
        self._buffered = self._opened(folder / "buffered", DiskWrites.BUFFERED)
        # The keys of the newest batches, with their digests. The store has more than these.
        self._held: deque[list[tuple[bytes, bytes]]] = deque(maxlen=max(1, sizes.capacity_bytes // ROUND_BYTES // 2))
        for _ in range(0, 3 * sizes.capacity_bytes, ROUND_BYTES):
            self.store()
            self.store_buffered()
            self.store_raw()
        for _ in range(0, sizes.capacity_bytes * 5 // 4, ROUND_BYTES):
            self.store_files()

    def close(self) -> None:
        self._store.close()
        self._buffered.close()
        self._raw.close()
        self._files.close()
        self._pool.shutdown()

    def store(self) -> Took:
        """Compute the digests of new blocks, and store them."""
        batches, took = self._store_in(self._store)
        self._held.append([(blob.key, blob.digest) for batch in batches for blob in batch.blobs()[::-1]])
        return took

    def store_buffered(self) -> Took:
        """Do as `store`, through the page cache."""
        return self._store_in(self._buffered)[1]

    def store_raw(self) -> Took:
        raws = [raw for _ in range(ROUND_BYTES // BATCH_BYTES) for raw in self._new.batch().raws]
        return timed(lambda: self._raw.write_direct(raws))

    def store_files(self) -> Took:
        batch = self._new.batch(ROUND_BYTES)
        return timed(lambda: self._files.put(batch))

    def load(self) -> Took:
        """Load and verify the blocks of a round, of which the store still has all."""
        held = self._rng.choice(self._held)
        found: list[object] = []
        took = timed(
            lambda: found.extend(self._store.read_many([key for key, _ in held], self._outs())), _pid(self._store)
        )
        assert found == [known for _, known in held], "blocks were not loaded"
        return took

    def load_raw(self, num_threads: int) -> Took:
        return timed(partial(self._raw.read, self._offset(), self._outs(), num_threads))

    def load_raw_direct(self) -> Took:
        return timed(partial(self._raw.read_run_direct, self._offset(), self._outs()))

    def cold(self, turn: Turn) -> Turn:
        """The same turn with no file of the store, and not the raw file, in the page cache."""

        def cold_turn() -> Took:
            drop_files(self._folder)
            return turn()

        return cold_turn

    def warm(self) -> None:
        """Read all files of the store, and the raw file, into the page cache."""
        for path in self._folder.rglob("*"):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.read(8 * MIB):
                        pass

    def _outs(self) -> list[memoryview]:
        return self._slots.outs(self._block_bytes, ROUND_BYTES // self._block_bytes)

    def _offset(self) -> int:
        return self._rng.randrange(self._sizes.capacity_bytes // ROUND_BYTES) * ROUND_BYTES

    def _opened(self, folder: Path, writes: DiskWrites) -> StoreProcess:
        capacity_bytes = self._sizes.capacity_bytes
        store = open_store(Kind.CHILD, Durability.PROCESS, folder, capacity_bytes, self._slots, writes)
        assert isinstance(store, StoreProcess)
        return store

    def _store_in(self, store: StoreProcess) -> tuple[list[Batch], Took]:
        batches = [self._new.batch() for _ in range(ROUND_BYTES // BATCH_BYTES)]
        took = timed(lambda: list(self._pool.map(lambda batch: batch.put(store, WRITERS), batches)), _pid(store))
        return batches, took


def _pid(store: StoreProcess) -> int:
    assert store.pid is not None
    return store.pid


def peers(folder: Path, lifeboat: Path | None, capacity_bytes: int) -> dict[str, str]:
    """What `--l2-adapter` of LMCache is given for each store of others, by its name."""

    def files(name: str, **options: object) -> str:
        return json.dumps({"type": name, "base_path": str(folder / f"{name} {len(options)}"), **options})

    specs = {FS: files("fs"), NATIVE: files("fs_native"), NATIVE_DIRECT: files("fs_native", use_odirect=True)}
    if lifeboat is not None:
        tier = {
            "name": "disk",
            "type": "filesystem",
            "scope": "node",
            "enabled": True,
            "path": str(folder / "lifeboat"),
        }
        rungs = ("gpu", "cpu", "local_nvme", "shared", "archive")
        configuration = {
            "storage": {"tiers": [tier | {"capacity_gb": capacity_bytes / GIB}]},
            "compression": {"ladder": dict.fromkeys(rungs, "none")},
            "dashboard": {"enabled": False},
        }
        module = {"module_path": "lifeboat_cache.integrations.lmcache_adapter", "class_name": "LifeboatL2Adapter"}
        specs[LIFEBOAT] = json.dumps({"type": "plugin", **module, "adapter_params": {"lifeboat_config": configuration}})
    return specs


@contextmanager
def peer_turns(
    folder: Path, python: str, lifeboat: Path | None, sizes: Sizes, block_bytes: int
) -> Iterator[dict[str, Turn]]:
    """Yield a turn of each store of others, which stores the blocks of a round."""
    before = [] if lifeboat is None else [lifeboat]
    number = 0
    with ToldScript(python, "l2_racer.py", str(sizes.source_bytes), before=before) as script:

        def store(name: str) -> Took:
            nonlocal number
            for path in folder.glob("fs*/**/*"):
                if path.is_file():
                    path.unlink()
            number += 1
            return Took(*script.store(name, number, ROUND_BYTES // block_bytes, block_bytes))

        for name, spec in peers(folder, lifeboat, sizes.capacity_bytes).items():
            script.make(name, spec)
            for _ in range(0, sizes.capacity_bytes if name == LIFEBOAT else 1, ROUND_BYTES):
                store(name)
        yield {name: partial(store, name) for name in peers(folder, lifeboat, sizes.capacity_bytes)}


def speeds(
    what: str, took: Mapping[str, Sequence[Took]], max_cpu: float | None, num_bytes: int = ROUND_BYTES
) -> list[Row]:
    """Rows of the speed and the CPU seconds per GB of each store; *max_cpu* is the promise for kvtier's."""
    rows: list[Row] = []
    for name, each in took.items():
        rows.append(Row(f"{what}: {name}", num_bytes / statistics.median(one.seconds for one in each) / 1e9, "GB/s"))
        label, cpu = f"{what}: {name}, CPU", statistics.median(one.cpu_s for one in each) / num_bytes * 1e9
        limit = max_cpu if name == OURS else None
        rows.append(Row(label, cpu, "s/GB") if limit is None else at_most(label, cpu, "s/GB", limit))
    return rows


def _times_as_fast(took: Mapping[str, Sequence[Took]], other: str, ours: str = OURS) -> float:
    return statistics.median(
        theirs.seconds / mine.seconds for mine, theirs in zip(took[ours], took[other], strict=True)
    )


def store_rows(size: str, block_bytes: int, took: Mapping[str, Sequence[Took]]) -> list[Row]:
    """Rows of the stores, with kvtier's times as fast as each of them, and its buffered mode's as those like it."""
    what = f"store, {size}"
    rows = speeds(what, took, MAX_STORE_CPU)
    for ours, targets in ((OURS, STORE_TARGETS), (BUFFERED, BUFFERED_TARGETS)):
        for other, target in targets.items():
            label = f"{what}: {ours} / {other}"
            if other in took:
                rows.append(at_least(label, _times_as_fast(took, other, ours), target(block_bytes)))
            else:
                rows.append(Row(label, 0, "(not installed)", f">= {target(block_bytes):g}", None, varies=True))
    return rows


def load_rows(size: str, stores: Stores, sizes: Sizes) -> list[Row]:
    """Rows of loads from the disk and from the page cache, each beside the raw file."""
    num_cores = len(os.sched_getaffinity(0))
    cold: dict[str, Turn] = {OURS: stores.cold(stores.load), RAW_READ: stores.cold(stores.load_raw_direct)}
    from_disk = raced(cold, sizes.rounds)
    stores.warm()
    every_core = f"{RAW_CACHED}, a thread per core"
    cached: dict[str, Turn] = {
        OURS: stores.load,
        RAW_CACHED: partial(stores.load_raw, 1),
        every_core: partial(stores.load_raw, num_cores),
    }
    from_cache = raced(cached, sizes.rounds)
    rows = speeds(f"load cold, {size}", from_disk, MAX_LOAD_CPU)
    rows.append(at_least(f"load cold, {size}: {OURS} / {RAW_READ}", _times_as_fast(from_disk, RAW_READ), 0.9))
    rows += speeds(f"load cached, {size}", from_cache, MAX_LOAD_CPU)
    rows.append(at_least(f"load cached, {size}: {OURS} / {RAW_CACHED}", _times_as_fast(from_cache, RAW_CACHED), 0.7))
    rows.append(at_least(f"load cached, {size}: {OURS} / {every_core}", _times_as_fast(from_cache, every_core), None))
    return rows


def flush_rows(folder: Path, sizes: Sizes, slots: Slots) -> list[Row]:
    """Rows of the flush of `Sizes.host_bytes` at an engine's end, beside raw writes of the same memory."""
    with ExitStack() as stack:
        tier = stack.enter_context(HostTier(folder / "store", sizes.host_bytes))
        raw = RawFile(folder / "raw", sizes.host_bytes, slots)
        stack.callback(raw.close)

        def flush() -> Took:
            tier.fill()
            return timed(tier.flush, tier.pid)

        turns: dict[str, Turn] = {OURS: flush, RAW: lambda: timed(lambda: raw.write_direct(tier.blocks))}
        flush()  # so that the store is full
        took = raced(turns, sizes.flushes)
    what = "flush of host memory"
    slower = at_most(f"{what}: time of {RAW}", 1 / _times_as_fast(took, RAW), "", 1.3)
    return [*speeds(what, took, None, sizes.host_bytes), slower]


def main() -> None:
    """Race the stores by block size, then flush."""
    parser = store_arguments((__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", required=True, help="of an environment with lmcache")
    parser.add_argument("--lifeboat", type=Path, help="a folder with the package lifeboatcache")
    options = parser.parse_args()
    sizes: Sizes = options.effort.of(Sizes(), QUICK)
    lifeboat = options.lifeboat if options.lifeboat is not None and options.lifeboat.is_dir() else None
    choice, rows = Choice(options.only), list[Row]()
    gc.freeze()
    with working_folder(options.folder) as folder:
        slots = Slots(sizes.source_bytes, ROUND_BYTES)
        for block_bytes in sizes.block_sizes:
            size, place = in_words(block_bytes), folder / str(block_bytes)
            chosen = [
                what for what in (f"store, {size}", f"load cold, {size}", f"load cached, {size}") if choice.has(what)
            ]
            if not chosen:
                continue
            note(f"blocks of {size}: filling the stores")
            with ExitStack() as stack:
                stores = Stores(place, block_bytes, sizes, slots)
                stack.callback(stores.close)
                if choice.has(f"store, {size}"):
                    turns: dict[str, Turn] = {
                        OURS: stores.store,
                        BUFFERED: stores.store_buffered,
                        RAW: stores.store_raw,
                        FILES: stores.store_files,
                    }
                    others = stack.enter_context(
                        peer_turns(place / "peers", options.python, lifeboat, sizes, block_bytes)
                    )
                    note(f"store, {size}")
                    rows += store_rows(size, block_bytes, raced(turns | others, sizes.rounds))
                note(f"load, {size}")
                rows += load_rows(size, stores, sizes)
            shutil.rmtree(place)
        if choice.has("flush"):
            note("flush")
            (folder / "flush").mkdir()
            rows += flush_rows(folder / "flush", sizes, slots)
    publish("store_race", choice.of(rows), options.json)


if __name__ == "__main__":
    main()
