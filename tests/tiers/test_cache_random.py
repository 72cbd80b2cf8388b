"""Random operations on a `TieredCache` whose copies are late, reordered and failing, and whose bytes rot."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from chaos import World

from kvtier.store.blob_store import BlobStore
from kvtier.store.lmdb_store import LmdbStore
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.block_hash import BlockName
from kvtier.tiers.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow
from kvtier.tiers.promotion import Promotion

BLOCK_SIZE = 4
DOCUMENTS = "abcdefghijklmn"
GROUPS = {
    "full": [FullAttention(BLOCK_SIZE)],
    "sliding": [SlidingWindow(BLOCK_SIZE, 10)],
    "hybrid": [SlidingWindow(BLOCK_SIZE, 10), FullAttention(BLOCK_SIZE)],
    "three": [FullAttention(BLOCK_SIZE), ChunkedLocal(BLOCK_SIZE, 16), SlidingWindow(BLOCK_SIZE, 7)],
}


@dataclass(eq=False)
class Reader:
    """A request of the test: a document's first tokens, and how far they have been computed."""

    names: Sequence[BlockName]
    num_tokens: int
    promotion: Promotion
    tables: list[list[int]] | None = None
    num_blocks: int = 0


class Simulation:
    def __init__(self, world: World, groups: Sequence[AttentionGroup]) -> None:
        self.world = world
        self.rng = world.rng
        self.cache = world.cache
        self.groups = groups
        self.readers: list[Reader] = []
        self.hits = 0

    def step(self) -> None:
        operations = [
            (8, self.arrive),
            (12, self.advance),
            (4, self.leave),
            (2, self.cancel),
            (10, self.cache.spill),
            (14, self.stir),
            (1, self.world.rot_a_host_block),
            (1, self.rot_the_store),
            (1, self.let_time_pass),
            (1, self.cache.reset),
        ]
        weights, choices = zip(*operations, strict=True)
        self.rng.choices(choices, weights)[0]()
        self.cache.poll()
        for reader in self.readers:
            if reader.tables is None and reader.promotion.done:
                self.start(reader)
        self.world.check()

    def arrive(self) -> None:
        num_tokens = self.rng.randrange(1, 60)
        names = self.world.names(self.rng.choice(DOCUMENTS), 60)[: num_tokens // BLOCK_SIZE]
        hit = self.cache.lookup(names, num_tokens)
        if self.rng.random() < 0.5 and not self.cache.make_room(hit):
            return
        timeout_s = self.rng.choice([None, 0.5, 5.0])
        self.readers.append(Reader(names, num_tokens, self.cache.promote(hit, timeout_s)))

    def start(self, reader: Reader) -> None:
        promotion = reader.promotion
        reader.tables, reader.num_blocks = promotion.tables, promotion.num_blocks
        balance = promotion.balance(reader.num_tokens, BLOCK_SIZE)
        assert balance.num_tokens == reader.num_tokens
        assert sum(balance.reasons.values()) == balance.recomputed
        assert promotion.num_blocks * BLOCK_SIZE < reader.num_tokens
        for group_id, (group, table) in enumerate(zip(self.groups, promotion.tables, strict=True)):
            first = group.first_needed(promotion.num_blocks * BLOCK_SIZE)
            for block_id in range(first, promotion.num_blocks):
                block = self.world.device[group_id][table[block_id]]
                assert (block == self.world.bytes_of(group_id, reader.names[block_id])).all(), "a hit with wrong bytes"
                self.hits += 1

    def advance(self) -> None:
        going = [r for r in self.readers if r.tables is not None and r.num_blocks < len(r.names)]
        if not going:
            return
        reader = self.rng.choice(going)
        assert reader.tables is not None
        self.cache.forget_read(reader.tables, reader.num_blocks * BLOCK_SIZE)
        end = min(len(reader.names), reader.num_blocks + self.rng.randrange(1, 5))
        slots = self.cache.allocate([end - len(table) for table in reader.tables])
        if slots is None:
            return
        for table, new in zip(reader.tables, slots, strict=True):
            table.extend(new)
        self.world.compute(reader.tables, reader.names, reader.num_blocks, end)
        reader.num_blocks = end

    def leave(self) -> None:
        done = [reader for reader in self.readers if reader.tables is not None]
        if done:
            reader = self.rng.choice(done)
            self.readers.remove(reader)
            self.cache.release(reader.tables)

    def cancel(self) -> None:
        parked = [reader for reader in self.readers if reader.tables is None]
        if parked:
            reader = self.rng.choice(parked)
            self.readers.remove(reader)
            self.cache.cancel(reader.promotion)

    def stir(self) -> None:
        for lane in self.world.lanes.values():
            if self.rng.random() < 0.7:
                lane.stir(self.rng.choice([0.3, 1.0]))

    def let_time_pass(self) -> None:
        self.world.clock.now += self.rng.choice([0.1, 1.0, 3.0])

    def rot_the_store(self) -> None:
        store = self.world.store
        if isinstance(store, MemoryStore) and (keys := list(store.keys())):
            rot(store, self.rng.choice(keys), self.rng)

    def finish(self) -> None:
        """Everybody leaves; nothing may be left leased or under way, and everything still has its bytes."""
        self.world.settle()
        for reader in self.readers:
            self.cache.cancel(reader.promotion) if reader.tables is None else self.cache.release(reader.tables)
        self.world.settle()
        self.world.check()
        pools = self.cache._residency.device.pools + self.cache._residency.host.pools
        assert [pool.num_free for pool in pools] == [pool.num_slots for pool in pools], "a slot leaked"


def rot(store: MemoryStore, key: bytes, rng: random.Random) -> None:
    """Flip one bit of the stored payload."""
    row = store._rows[key]
    payload = bytearray(row.payload)
    payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
    store._rows[key] = replace(row, payload=bytes(payload))


def seeds(count: int) -> list[int]:
    """Fresh seeds each run, printed by pytest as the test's parameter; KVTIER_SEED repeats one."""
    if "KVTIER_SEED" in os.environ:
        return [int(os.environ["KVTIER_SEED"])]
    return [random.SystemRandom().randrange(1 << 30) for _ in range(count)]


def run(groups: Sequence[AttentionGroup], store: BlobStore, seed: int, num_steps: int) -> Simulation:
    rng = random.Random(seed)
    sizes = [rng.choice([48, 64, 96]) for _ in groups]
    world = World(groups, sizes, rng.choice([16, 24, 40]), rng.choice([6, 40, 80]), store, rng, rng.choice([0.0, 0.3]))
    simulation = Simulation(world, groups)
    for _ in range(num_steps):
        simulation.step()
    simulation.finish()
    return simulation


@pytest.mark.parametrize("kind", GROUPS)
def test_no_wrong_byte_and_no_leaked_slot_over_a_rotting_store_in_memory(kind: str) -> None:
    hits = 0
    for seed in seeds(4):
        print(f"KVTIER_SEED={seed}")
        hits += run(GROUPS[kind], MemoryStore(16 * 4096 * 2), seed, 600).hits

    assert hits > 0, "the simulation never hit: it shows nothing"


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_no_wrong_byte_and_no_leaked_slot_over_lmdb(kind: str, tmp_path: Path) -> None:
    (seed,) = seeds(1)
    print(f"KVTIER_SEED={seed}")

    with LmdbStore(tmp_path / "store", 64 * 4096 * 2) as store:
        assert run(GROUPS[kind], store, seed, 400).hits > 0
        store.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", GROUPS)
def test_no_wrong_byte_and_no_leaked_slot_in_a_hundred_long_runs(kind: str) -> None:
    for seed in seeds(100):
        print(f"KVTIER_SEED={seed}")
        num_records = random.Random(seed).choice([8, 16, 60])
        run(GROUPS[kind], MemoryStore(num_records * 4096 * 2), seed, 1000)
