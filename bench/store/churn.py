"""How do the speed of a store and the size of its files change when it is overwritten many times?"""

import random
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.report import Row
from bench.rounds import GIB, KIB, Choice, at_least, at_most, seconds, spread
from bench.store.blocks import BATCH_BYTES, BLOCK_SIZES, Batch, Blocks, NewBlocks, Slots
from bench.store.ground import RawFile, Scale, note
from bench.store.kinds import Kind, open_store
from kvtier.store.blob_store import BlobStore, StoreFull
from kvtier.store.durability import Durability

NUM_PARTS = 8  # into which a pass is divided, for the spread
TOUCHED_PART = 8  # for each batch written, one block in so many of an earlier one is touched
MIXES = {"256 KiB": (256 * KIB,), "a mix": BLOCK_SIZES}


def churn(folder: Path, scale: Scale, slots: Slots, choice: Choice) -> list[Row]:
    """Measure each mix of sizes in a store of its own."""
    rows: list[Row] = []
    for name, sizes in MIXES.items():
        if choice.has(f"churn, {name}"):
            note(f"churn, {name}")
            rows += _churn(f"churn, {name}", folder / name.replace(" ", "_"), sizes, scale, slots)
    return rows


def _churn(name: str, folder: Path, sizes: Sequence[int], scale: Scale, slots: Slots) -> list[Row]:
    """Measure one mix. A raw file, written in turn with the first and last pass, shows the machine's speed then."""
    folder.mkdir()
    blocks = Blocks(slots)
    new = NewBlocks(blocks, sizes)
    raw_file = RawFile(folder / "raw", scale.capacity_bytes, slots)
    store_folder = folder / "store"
    store = open_store(Kind.INLINE, Durability.PROCESS, store_folder, scale.capacity_bytes, slots)
    try:
        passes = Passes(store, new, raw_file, scale.capacity_bytes // BATCH_BYTES)
        for _ in range(2):  # the first fills the store, the second gives the file all pages that it will need
            passes.fill()
        first = passes.timed()
        for _ in range(scale.turnovers - 2):
            passes.fill()
        last = passes.timed()
        live_bytes = sum(blocks.num_bytes(key) for key in store.keys())  # noqa: SIM118  # no dict
    except StoreFull as error:
        return [Row(f"{name}: the store said: {error}", 0, "", "room", False)]
    finally:
        store.close()
        raw_file.close()
    file_bytes = sum(path.stat().st_blocks * 512 for path in store_folder.iterdir())
    when = f"{name}, the last of {scale.turnovers} passes"
    slowdown = [before / after for before, after in zip(first.of_raw, last.of_raw, strict=True)]
    ratio = last.gb_per_s / first.gb_per_s
    of_raw = last.gb_per_s / last.raw_gb_per_s * first.raw_gb_per_s / first.gb_per_s
    return [
        Row(f"{name}, the first pass: kvtier", first.gb_per_s, "GB/s"),
        Row(f"{when}: kvtier", last.gb_per_s, "GB/s"),
        Row(f"{name}, the first pass: raw", first.raw_gb_per_s, "GB/s"),
        Row(f"{when}: raw", last.raw_gb_per_s, "GB/s"),
        Row(f"{when} / the first", ratio, ""),
        at_least(f"{when} / the first, both of raw meanwhile", of_raw, 0.8),
        Row(f"{when} / the first, spread among {NUM_PARTS} parts", spread(slowdown), "%"),
        at_most(f"{name}: bytes of the store's files / bytes alive", file_bytes / live_bytes, "", 1.25),
        Row(f"{name}: bytes alive", live_bytes / GIB, "GiB"),
    ]


class Passes:
    """Writes a store's capacity again and again."""

    def __init__(self, store: BlobStore, new: NewBlocks, raw_file: RawFile, num_batches: int) -> None:
        self._store = store
        self._new = new
        self._raw_file = raw_file
        self._num_batches = num_batches
        self._rng = random.Random(0)
        self._past: deque[list[bytes]] = deque(maxlen=num_batches)

    def fill(self) -> None:
        """Write one pass, to the raw file too, so that its pages are dirty like the store's."""
        for _ in range(self._num_batches):
            batch = self._batch()
            batch.put(self._store)
            self._raw_file.write(batch.raws)

    def timed(self) -> "Pass":
        """Time one pass over the store and over the raw file, batch by batch in turn."""
        times: dict[str, list[float]] = {"kvtier": [], "raw": []}
        num_bytes = 0
        for _ in range(self._num_batches):
            batch = self._batch()
            num_bytes += sum(raw.nbytes for raw in batch.raws)
            works = {"kvtier": partial(batch.put, self._store), "raw": partial(self._raw_file.write, batch.raws)}
            for name in self._rng.sample(list(works), 2):
                times[name].append(seconds(works[name]))
        return Pass(num_bytes, times["kvtier"], times["raw"])

    def _batch(self) -> Batch:
        """The next batch. Blocks of an earlier one are touched meanwhile, so that they are not evicted in order."""
        batch = self._new.batch()
        if self._past:
            keys = self._rng.choice(self._past)
            self._store.touch(self._rng.sample(keys, -(-len(keys) // TOUCHED_PART)))
        self._past.append(batch.keys)
        return batch


class Pass:
    """Speeds of one pass."""

    def __init__(self, num_bytes: int, ours: Sequence[float], raws: Sequence[float]) -> None:
        step = -(-len(ours) // NUM_PARTS)
        parts = range(0, len(ours), step)
        self.of_raw = [sum(raws[i : i + step]) / sum(ours[i : i + step]) for i in parts]
        self.gb_per_s = num_bytes / sum(ours) / 1e9
        self.raw_gb_per_s = num_bytes / sum(raws) / 1e9
