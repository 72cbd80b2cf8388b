"""How long does it take to open a store, and then to find a prompt in it, with few records and with many?"""

import random
import statistics
from hashlib import sha256
from pathlib import Path

from bench.report import Row
from bench.rounds import KIB, Choice, at_most, seconds, spread
from bench.store.blocks import NAMESPACE, Slots
from bench.store.ground import Scale, note
from bench.store.kinds import Kind, open_store
from kvtier.store.blob_store import Blob, BlobStore
from kvtier.store.durability import Durability
from kvtier.store.record import digest
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.naming.block_hash import BlockName

CHAIN_BLOCKS = 8192  # that a prompt has
VALUE_BYTES = 64
PUT_BLOCKS = 6 * CHAIN_BLOCKS
RECORD_BYTES = 8 * KIB  # more than a record with such a value is charged

ASKING = "asking then"


def opening(folder: Path, scale: Scale, slots: Slots, choice: Choice) -> list[Row]:
    """Open both stores in random order, with a warm page cache; a first round is left out."""
    counts = (scale.few_records, scale.many_records)
    folders = {num: _filled(folder / f"open_{num}", num, slots) for num in counts}
    opened: dict[int, list[float]] = {num: [] for num in counts}
    found: dict[tuple[int, str], list[float]] = {}
    rng = random.Random(0)
    note("opening")
    for round_id in range(max(scale.opening_rounds, scale.rounds) + 1):
        for num in rng.sample(counts, 2):
            stores: list[BlobStore] = []
            took = seconds(lambda num=num, stores=stores: stores.append(_open(folders[num], num, slots)))  # type: ignore[misc]
            with stores[0] as store:
                asked = _ask(store, num)
            if round_id:
                opened[num].append(1000 * took)
                for what, asking in asked.items():
                    found.setdefault((num, what), []).append(1000 * asking)

    few, many = counts
    ratios = [large / small for small, large in zip(opened[few], opened[many], strict=True)]
    prefix = f"prefix of {CHAIN_BLOCKS:,} blocks"
    return choice.of(
        [
            Row(f"open, {few:,} records", statistics.median(opened[few]), "ms"),
            Row(f"open, {few:,} records: spread of that", spread(opened[few]), "%"),
            at_most(f"open, {many:,} records", statistics.median(opened[many]), "ms", 50),
            Row(f"open, {many:,} records: spread of that", spread(opened[many]), "%"),
            at_most("open, the large store / the small one", statistics.median(ratios), "", 1.2),
            Row("open, spread of that", spread(ratios), "%"),
            *(
                at_most(f"{prefix}, {num:,} records: {what}", statistics.median(times), "ms", 4)
                if what == ASKING
                else Row(f"{prefix}, {num:,} records: {what}", statistics.median(times), "ms")
                for (num, what), times in found.items()
            ),
        ]
    )


# THE INDEX UNDER TEST: a tier reads it to find how much of a prompt the disk has.
def _ask(store: BlobStore, num_records: int) -> dict[str, float]:
    """Seconds until a new tier knows the newest prompt, until it knows all blocks, and of asking it then."""
    newest, oldest = _chain((num_records - 1) // PUT_BLOCKS * PUT_BLOCKS), _chain(0)
    tier = DiskTier(store, NAMESPACE)
    known: list[int] = []

    def load_newest() -> None:
        while not tier.index.is_loaded and tier.num_held(0, newest) < CHAIN_BLOCKS:
            tier.load(tier.read_index())

    def load_rest() -> None:
        while not tier.index.is_loaded:
            tier.load(tier.read_index())

    until_newest = seconds(load_newest)
    until_all = until_newest + seconds(load_rest)
    asking = seconds(lambda: known.append(tier.num_held(0, oldest)))
    assert [*known, tier.num_held(0, newest)] == [CHAIN_BLOCKS] * 2, f"{known} of {CHAIN_BLOCKS} blocks known"
    return {"until the newest prompt is known": until_newest, "until all are": until_all, ASKING: asking}


def _filled(folder: Path, num_records: int, slots: Slots) -> Path:
    """Fill the store in *folder* with prompts, unless an earlier run has, and return *folder*."""
    with _open(folder, num_records, slots) as store:
        num_there = store.statistics().num_records
        if num_there != num_records:
            note(f"filling a store with {num_records:,} records")
            tier = DiskTier(store, NAMESPACE)
            raw = memoryview(slots.source(0, VALUE_BYTES))
            for start in range(0, num_records, PUT_BLOCKS):
                numbers = range(start, min(start + PUT_BLOCKS, num_records))
                keys = [tier.key(0, _name(number)) for number in numbers]
                parents = [b"", *keys[:-1]]
                blobs = [
                    Blob(key, digest(raw), raw, parent if number % CHAIN_BLOCKS else b"")
                    for number, key, parent in zip(numbers, keys, parents, strict=True)
                ]
                store.put_many(blobs[::-1])
        num_there = store.statistics().num_records
        assert num_there == num_records, f"{num_there:,} records of {num_records:,}; empty {folder}"
    return folder


def _open(folder: Path, num_records: int, slots: Slots) -> BlobStore:
    return open_store(Kind.INLINE, Durability.PROCESS, folder, num_records * RECORD_BYTES, slots)


def _chain(first: int) -> list[BlockName]:
    return [_name(number) for number in range(first, first + CHAIN_BLOCKS)]


def _name(number: int) -> BlockName:
    return BlockName(sha256(number.to_bytes(8, "big")).digest())
