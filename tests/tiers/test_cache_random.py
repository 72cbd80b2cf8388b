"""Random operations on a `TieredCache` whose copies are late, reordered and failing, and whose bytes rot."""

import os
import random
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from chaos import NAMESPACE, World
from lying_remote import LyingRemote, Vices
from memory_remote import MemoryRemote
from store_cases import rot

from kvtier.store.blob_store import Blob, BlobStore
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import digest
from kvtier.store.remote.sealed_remote import SealedRemote
from kvtier.store.remote_store import RemoteUnavailable
from kvtier.tiers import pins, purge
from kvtier.tiers.device import slot_purge
from kvtier.tiers.lower import disk_purge, reads
from kvtier.tiers.lower.name_set import block_key
from kvtier.tiers.lower.purge import PurgeOrder
from kvtier.tiers.lower.remote.remote_tier import RemoteRecords
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.groups import (
    AttentionGroup,
    ChunkedLocal,
    FullAttention,
    RecurrentState,
    SlidingWindow,
    alignment,
)
from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.pins import Pin
from kvtier.tiers.purge import CachePurge
from kvtier.tiers.up import promoter, uploads
from kvtier.tiers.up.promotion import Promotion, Tables

BLOCK_SIZE = 4
DOCUMENTS = "abcdefghijklmn"
GROUPS = {
    "full": [FullAttention(BLOCK_SIZE)],
    "sliding": [SlidingWindow(BLOCK_SIZE, 10)],
    "hybrid": [SlidingWindow(BLOCK_SIZE, 10), FullAttention(BLOCK_SIZE)],
    "three": [FullAttention(BLOCK_SIZE), ChunkedLocal(BLOCK_SIZE, 16), SlidingWindow(BLOCK_SIZE, 7)],
    "sizes": [FullAttention(2 * BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 10)],
    "states": [FullAttention(BLOCK_SIZE), RecurrentState(4 * BLOCK_SIZE)],
}


@dataclass(eq=False)
class Reader:
    """A request of the test: a document's first tokens, and how far they have been computed."""

    chain: BlockChain
    num_tokens: int
    promotion: Promotion
    tables: Tables | None = None
    num_computed: int = 0
    is_split: bool = False  # it computes the front while the promotion brings the rest


class Simulation:
    def __init__(self, world: World, groups: Sequence[AttentionGroup]) -> None:
        self.world = world
        self.rng = world.rng
        self.cache = world.cache
        self.groups = groups
        self.readers: list[Reader] = []
        self.holds: list[Pin] = []
        self.hits = 0
        self.copies = 0
        self.splits = 0
        self.from_remote = 0  # tokens
        self.purges: list[CachePurge] = []
        self.whole = 0  # pins that were whole

    def step(self) -> None:
        operations = [
            (80, self.arrive),
            (120, self.advance),
            (40, self.leave),
            (20, self.cancel),
            (100, self.cache.spill),
            (30, self.hold_or_let_go),
            (140, self.stir),
            (10, self.world.rot_a_host_block),
            (10, self.rot_the_store),
            (10, self.let_time_pass),
            (1, self.cache.reset),
            (4, self.purge),
            (4, self.have_below_die),
        ]
        weights, choices = zip(*operations, strict=True)
        self.rng.choices(choices, weights)[0]()
        self.purges = [each for each in self.purges if not each.go_on()]
        self.cache.poll()
        for reader in self.readers:
            promotion = reader.promotion
            if promotion.done and (reader.tables is None or self.is_at_the_rest(reader)):
                self.start(reader)
        self.world.check()

    def arrive(self) -> None:
        if len(self.readers) > self.rng.randrange(1, 6):  # more would lease all there is, and nothing moved
            self.leave()
            return
        num_tokens = self.rng.randrange(1, 60)
        chain = self.world.chain(self.rng.choice(DOCUMENTS), num_tokens)
        inquiry = self.cache.lookups.inquire(chain, num_tokens)
        if not inquiry.is_done and self.rng.random() < 0.8:  # it comes again
            return
        hit = self.cache.lookup(chain, num_tokens)
        if self.rng.random() < 0.5 and not self.cache.make_room(hit):
            return
        timeout_s = self.rng.choice([None, 0.5, 5.0])
        starts = range(self.cache.plans.on_device(hit).num_tokens, hit.num_tokens, alignment(self.cache.groups))[1:]
        if len(starts) and not any(group.forgets for group in self.groups) and self.rng.random() < 0.5:
            front = self.cache.promote(self.cache.plans.on_device(hit))
            assert front.done
            rest = self.cache.promote(replace(hit, start=self.rng.choice(starts)), timeout_s)
            self.readers.append(Reader(chain, num_tokens, rest, front.tables, front.num_tokens, is_split=True))
            return
        self.readers.append(Reader(chain, num_tokens, self.cache.promote(hit, timeout_s)))

    def start(self, reader: Reader) -> None:
        promotion = reader.promotion
        if reader.tables is None:
            reader.tables = promotion.tables
        else:
            for table, rest, group in zip(reader.tables, promotion.tables, self.groups, strict=True):
                table.extend(rest[promotion.start // group.block_size :])
            reader.is_split = False
            self.splits += 1
        reader.num_computed = promotion.num_tokens + promotion.num_copied
        balance = promotion.balance(reader.num_tokens)
        assert balance.num_tokens == reader.num_tokens
        self.from_remote += balance.remote
        assert sum(balance.reasons.values()) == balance.recomputed
        assert promotion.num_tokens + promotion.num_copied < reader.num_tokens
        for group_id, (group, table) in enumerate(zip(self.groups, reader.tables, strict=True)):
            last = promotion.num_tokens // group.block_size
            needed = range(group.first_needed(promotion.num_tokens), last)
            for block_id, name in zip(needed, reader.chain.names_of(group.block_size, needed), strict=True):
                block = self.world.device[group_id][table[block_id]]
                assert (block == self.world.bytes_of(group_id, name)).all(), "a hit with wrong bytes"
                self.hits += 1
            if promotion.num_copied:
                self.check_copy(reader, group_id, table[last])

    def check_copy(self, reader: Reader, group_id: int, slot: int) -> None:
        """The copied block is the next of the same document: the only one here that shares its tokens."""
        promotion, size = reader.promotion, self.groups[group_id].block_size
        longer = self.world.chain(reader.chain.extra.cache_salt or "", promotion.num_tokens + size)
        (name,) = longer.names_of(size, range(promotion.num_tokens // size, promotion.num_tokens // size + 1))
        assert (self.world.device[group_id][slot] == self.world.bytes_of(group_id, name)).all(), "a wrong copy"
        assert 0 < promotion.num_copied <= min(size, reader.num_tokens - 1 - promotion.num_tokens)
        self.copies += 1

    def advance(self) -> None:
        going = [r for r in self.readers if r.tables is not None and r.num_computed < self.end(r)]
        if not going:
            return
        reader = self.rng.choice([r for r in going if r.is_split] or going)
        assert reader.tables is not None
        self.cache.forget_read(reader.tables, reader.num_computed)
        end = min(self.end(reader), reader.num_computed + self.rng.randrange(1, 20))
        pairs = zip(self.groups, reader.tables, strict=True)
        slots = self.cache.allocate([-(-end // group.block_size) - len(table) for group, table in pairs])
        if slots is None:
            return
        for table, new in zip(reader.tables, slots, strict=True):
            table.extend(new)
        self.world.compute(reader.tables, reader.chain, reader.num_computed, end)
        reader.num_computed = end

    def is_at_the_rest(self, reader: Reader) -> bool:
        return reader.is_split and reader.num_computed >= reader.promotion.start

    def end(self, reader: Reader) -> int:
        return reader.promotion.start if reader.is_split else reader.num_tokens

    def leave(self) -> None:
        done = [r for r in self.readers if r.tables is not None and (not r.is_split or self.rng.random() < 0.3)]
        if done:
            reader = self.rng.choice(done)
            self.readers.remove(reader)
            if reader.is_split:
                self.cache.cancel(reader.promotion)
            self.world.leave(reader.tables, reader.chain, reader.num_computed)

    def cancel(self) -> None:
        parked = [reader for reader in self.readers if reader.tables is None]
        if parked:
            reader = self.rng.choice(parked)
            self.readers.remove(reader)
            self.cache.cancel(reader.promotion)

    def hold_or_let_go(self) -> None:
        if self.holds and self.rng.random() < 0.6:
            pin = self.rng.choice(self.holds)
            self.holds.remove(pin)
            self.whole += pin.is_whole and pin.num_bytes > 0
            self.cache.pins.unpin(pin)
        num_tokens = self.rng.randrange(1, 60)
        pin = self.cache.pins.pin(self.world.chain(self.rng.choice(DOCUMENTS), num_tokens), num_tokens)
        if pin is not None:
            self.holds.append(pin)

    def purge(self) -> None:
        tiers = frozenset(self.rng.sample(list(Tier), self.rng.randrange(1, 4)))
        tenant = self.rng.choice([None, tenant_of(self.rng.choice(DOCUMENTS))])
        self.purges.append(self.cache.purge(PurgeOrder(tiers, tenant, max_blocks=self.rng.choice([None, 1, 7]))))

    def stir(self) -> None:
        for lane in self.world.all_lanes:
            if self.rng.random() < 0.7:
                lane.stir(self.rng.choice([0.3, 1.0]))

    def have_below_die(self) -> None:
        self.world.die_below()

    def let_time_pass(self) -> None:
        self.world.clock.now += self.rng.choice([0.01, 0.1, 1.0, 3.0])

    def rot_the_store(self) -> None:
        store = self.world.store
        if isinstance(store, MemoryStore) and (keys := list(store.keys())):
            rot(store, self.rng.choice(keys), self.rng)

    def finish(self) -> None:
        """Everybody leaves; nothing may be left leased or under way, and everything still has its bytes."""
        self.world.settle()
        for pin in self.holds:
            self.cache.pins.unpin(pin)
        for reader in self.readers:
            if reader.tables is None or reader.is_split:
                self.cache.cancel(reader.promotion)
            if reader.tables is not None:
                self.cache.release(reader.tables)
        self.world.settle()
        self.world.clock.now += 10  # what an engine keeps ready of a sidecar's slots goes back
        self.world.settle()
        self.world.check()
        slots = [group.slots for group in self.cache.residency.groups]
        assert [each.pool.num_free for each in slots] == [each.pool.num_slots for each in slots], "a slot leaked"
        assert not self.world.num_leased_below(), "a slot leaked below"


@pytest.fixture(autouse=True)
def _small_blocks_come_by_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BY_LAYERS_BYTES", 0)


def seeds(count: int) -> list[int]:
    """Fresh seeds each run, printed by pytest as the test's parameter; KVTIER_SEED repeats one."""
    if "KVTIER_SEED" in os.environ:
        return [int(os.environ["KVTIER_SEED"])]
    return [random.SystemRandom().randrange(1 << 30) for _ in range(count)]


DISK_QUOTAS = {tenant_of(document): 5 * 4608 for document in DOCUMENTS[:4]}


PARTS = [  # what is done at once, and how much is under way at most
    (promoter, "PART", [1, 3, 128]),
    (promoter, "MAX_IN_FLIGHT", [1, 4, 512]),
    (pins, "PART", [1, 3, 128]),
    (pins, "MAX_IN_FLIGHT", [1, 4, 512]),
    (reads, "BATCH_BLOCKS", [1, 2, 64]),
    (uploads, "BATCH_BLOCKS", [1, 2, 64]),
    (promoter, "REFRESH_PART", [1, 3, 128]),
    (purge, "PARTS_S", [0, 1]),
    (slot_purge, "SCAN_ENTRIES", [1, 3, 128]),
    (slot_purge, "MAX_EVICTED", [1, 3, 128]),
    (disk_purge, "MAX_EVICTED", [1, 3, 128]),
]


def run(
    groups: Sequence[AttentionGroup],
    store: BlobStore,
    seed: int,
    num_steps: int,
    is_unreliable: bool = False,
    is_apart: bool = False,
    remote: RemoteRecords | None = None,
) -> Simulation:
    rng = random.Random(seed)
    sizes = [rng.choice([48, 64, 96]) for _ in groups]
    slots, failing = [rng.choice([16, 24, 40]), rng.choice([6, 40, 80])], rng.choice([0.0, 0.3])
    quotas = {tenant_of(document): rng.randrange(20 * sum(sizes)) for document in DOCUMENTS if rng.random() < 0.3}
    budget = rng.choice([None, None, 2000])
    by_layers = rng.random() < 0.5
    world = World(
        groups,
        sizes,
        *slots,
        store,
        rng,
        failing,
        budget,
        is_unreliable=is_unreliable,
        is_apart=is_apart,
        remote=remote,
        quotas=quotas,
        by_layers=by_layers,
        copies_all_down=seed % 3 == 0,
    )
    simulation = Simulation(world, groups)
    if remote is not None:
        fill(remote, world)
    with closing(world), pytest.MonkeyPatch.context() as patch:
        for module, name, sizes in PARTS:
            patch.setattr(module, name, rng.choice(sizes))
        for _ in range(num_steps):
            simulation.step()
        simulation.finish()
    return simulation


@pytest.mark.parametrize("kind", GROUPS)
def test_no_wrong_byte_and_no_leaked_slot_over_a_rotting_store_in_memory(kind: str) -> None:
    (seed,) = seeds(1)
    print(f"KVTIER_SEED={seed}")

    run(GROUPS[kind], MemoryStore(16 * 4096 * 2, quotas=DISK_QUOTAS), seed, 300)


@pytest.mark.long
@pytest.mark.parametrize("kind", GROUPS)
def test_a_few_runs_over_a_rotting_store_see_all_that_may_happen(kind: str) -> None:
    runs = []
    for seed in seeds(2) + seeds(60):  # the latter until something rare has happened: of three groups all are held
        if len(runs) >= 2 and any(run.whole for run in runs) and (kind != "full" or any(run.splits for run in runs)):
            break
        print(f"KVTIER_SEED={seed}")
        runs.append(run(GROUPS[kind], MemoryStore(16 * 4096 * 2, quotas=DISK_QUOTAS), seed, 600))

    assert sum(run.hits for run in runs) > 0, "the simulation never hit: it shows nothing"
    assert sum(run.whole for run in runs) > 0, "nothing was ever held"
    assert (sum(run.splits for run in runs) > 0) == (kind == "full")
    assert (sum(run.copies for run in runs) > 0) == (kind not in ("sizes", "states"))


def fill(remote: RemoteRecords, world: World) -> None:
    """Another machine has put half of the documents there."""
    namespace = NAMESPACE if world.sidecar is None else world.sidecar.tiers.layout.digest
    for document in DOCUMENTS[::2]:
        for group_id, group in enumerate(world.cache.groups):
            chain = world.chain(document, 64)
            for name in chain.names_of(group.block_size, range(64 // group.block_size)):
                raw = world.bytes_of(group_id, name)
                blob = Blob(block_key(namespace, group_id, name), digest(raw), memoryview(raw))
                with suppress(RemoteUnavailable):
                    remote.put_many([blob])


def lying_remote(seed: int) -> SealedRemote:
    rng = random.Random(seed)
    vices = Vices(*(rng.choice([0.0, 0.05, 0.3]) for _ in range(4)))
    return SealedRemote(LyingRemote(MemoryRemote(), rng, vices))


@pytest.mark.parametrize("is_apart", [False, True], ids=["here", "apart"])
@pytest.mark.parametrize("kind", GROUPS)
def test_no_wrong_byte_and_no_leaked_slot_over_a_remote_store_that_lies(kind: str, is_apart: bool) -> None:
    (seed,) = seeds(1)
    print(f"KVTIER_SEED={seed}")

    store = MemoryStore(8 * 4096 * 2)
    run(GROUPS[kind], store, seed, 300, is_apart=is_apart, remote=lying_remote(seed))


@pytest.mark.long
@pytest.mark.parametrize("is_apart", [False, True], ids=["here", "apart"])
@pytest.mark.parametrize("kind", GROUPS)
def test_a_few_runs_over_a_remote_store_find_blocks_there(kind: str, is_apart: bool) -> None:
    runs = []
    for seed in seeds(30):
        print(f"KVTIER_SEED={seed}")
        remote = SealedRemote(MemoryRemote())
        runs.append(run(GROUPS[kind], MemoryStore(4096 * 2), seed, 400, is_apart=is_apart, remote=remote))
        if len(runs) >= 2 and any(run.from_remote for run in runs):
            break

    assert any(run.from_remote for run in runs), "nothing ever came from there: it shows nothing"


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_no_wrong_byte_and_no_leaked_slot_over_lmdb(kind: str, tmp_path: Path) -> None:
    (seed,) = seeds(1)
    print(f"KVTIER_SEED={seed}")

    with LmdbStore(tmp_path / "store", 64 * 4096 * 2, quotas=DISK_QUOTAS) as store:
        assert run(GROUPS[kind], store, seed, 400).hits > 0
        store.check()


@pytest.mark.parametrize("kind", GROUPS)
def test_no_wrong_byte_and_no_leaked_slot_over_tiers_that_are_late_and_die(kind: str) -> None:
    (seed,) = seeds(1)
    print(f"KVTIER_SEED={seed}")

    run(GROUPS[kind], MemoryStore(16 * 4096 * 2, quotas=DISK_QUOTAS), seed, 300, is_unreliable=True)


@pytest.mark.parametrize("kind", GROUPS)
def test_no_wrong_byte_and_no_leaked_slot_over_a_sidecar_that_is_late_and_dies(kind: str) -> None:
    (seed,) = seeds(1)
    print(f"KVTIER_SEED={seed}")

    run(GROUPS[kind], MemoryStore(16 * 4096 * 2, quotas=DISK_QUOTAS), seed, 300, is_apart=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", GROUPS)
def test_no_wrong_byte_and_no_leaked_slot_in_many_long_runs_over_a_sidecar_that_is_late_and_dies(kind: str) -> None:
    runs = []
    for seed in seeds(34):  # 204 runs over all kinds
        print(f"KVTIER_SEED={seed}")
        num_records = random.Random(seed).choice([8, 16, 60])
        runs.append(run(GROUPS[kind], MemoryStore(num_records * 4096 * 2), seed, 1000, is_apart=True))

    assert sum(run.hits for run in runs) > 0, "the simulation never hit: it shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("kind", GROUPS)
def test_no_wrong_byte_and_no_leaked_slot_in_many_long_runs_over_tiers_that_are_late_and_die(kind: str) -> None:
    runs = []
    for seed in seeds(34):  # 204 runs over all kinds
        print(f"KVTIER_SEED={seed}")
        num_records = random.Random(seed).choice([8, 16, 60])
        runs.append(run(GROUPS[kind], MemoryStore(num_records * 4096 * 2), seed, 1000, is_unreliable=True))

    assert sum(run.hits for run in runs) > 0, "the simulation never hit: it shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("kind", GROUPS)
def test_no_wrong_byte_and_no_leaked_slot_in_a_hundred_long_runs(kind: str) -> None:
    for seed in seeds(100):
        print(f"KVTIER_SEED={seed}")
        num_records = random.Random(seed).choice([8, 16, 60])
        run(GROUPS[kind], MemoryStore(num_records * 4096 * 2), seed, 1000)
