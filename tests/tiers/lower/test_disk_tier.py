"""The disk as a tier: its index in memory, and what it costs when it fails or may not be written much."""

import random
from collections.abc import Iterator, Sequence

import pytest
from chaos import NAMESPACE, FakeClock, World
from late_store import LateStore, empty
from small_cache import BLOCK_BYTES, CHARGE, DOCUMENT, balance, read

from kvtier.store.blob_store import Blob, StoreFull
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import digest
from kvtier.tiers.lower import disk_tier
from kvtier.tiers.lower.admission import DAY_S
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.disk_index import DiskIndex
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.name_set import rows_of
from kvtier.tiers.lower.ssd_life import SsdLife
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.transfer.transfer_engine import Route

BLOCK_SIZE = 4


def world(store: MemoryStore, written_bytes_per_day: int | None = None, num_host_slots: int = 24) -> World:
    groups = [FullAttention(BLOCK_SIZE)]
    return World(
        groups, [BLOCK_BYTES], 16, num_host_slots, store, random.Random(1), written_bytes_per_day=written_bytes_per_day
    )


def name(number: int) -> BlockName:
    return BlockName(number.to_bytes(32, "big"))


def test_a_key_is_one_namespaces_groups_and_names() -> None:
    one, other = (DiskTier(MemoryStore(1 << 20), letter * 16) for letter in (b"a", b"b"))
    keys = [one.key(0, name(1)), one.key(1, name(1)), one.key(0, name(2)), other.key(0, name(1))]

    assert len(set(keys)) == 4
    assert [one.block_of(key) for key in keys] == [(0, name(1)), (1, name(1)), (0, name(2)), None]


def test_an_index_agrees_with_a_model_whatever_happens_while_it_is_loaded() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    disk = {(group, n) for group in range(2) for n in range(300) if rng.random() < 0.7}
    pages = sorted(disk)
    rng.shuffle(pages)
    index = DiskIndex()
    while pages or not index.is_loaded:
        action = rng.random()
        group, n = rng.randrange(2), rng.randrange(300)
        if action < 0.3:
            page, pages = pages[:20], pages[20:]
            for group_id in range(2):
                index.load(group_id, rows_of([name(n) for g, n in page if g == group_id]))
            if not pages:
                index.finish_loading()
        elif action < 0.7:
            index.add(group, [name(n)])
            disk.add((group, n))
        else:
            index.remove(group, name(n))
            disk.discard((group, n))
    assert {(group, n) for group in range(2) for n in range(300) if index.holds(group, name(n))} == disk
    assert index.num_blocks == len(disk)
    for group in range(2):
        first_gone = next(n for n in range(301) if (group, n) not in disk)
        assert index.num_held(group, [name(n) for n in range(301)]) == first_gone


def test_the_pages_of_an_index_that_is_emptied_end_and_what_was_in_it_is_handed_over() -> None:
    numbered = [name(number) for number in range(40)]
    index = DiskIndex()
    index.finish_loading()
    index.add(0, numbered[:30])
    pages = index.pages(0)
    first = next(pages, None)
    index.empty()
    index.add(0, numbered[20:40])

    assert first is not None
    assert list(pages) == []
    assert index.is_loaded
    assert {name for page in index.pages(0) for name in page} == set(numbered[20:40])
    assert list(index.pages(7)) == []
    gone = set[BlockName]()
    assert index.is_forgetting
    while index.is_forgetting:
        forgotten = index.pop_forgotten()
        gone.update(() if forgotten is None else forgotten.names)
    assert gone == set(numbered[:30])


def test_the_newest_blocks_are_known_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "PAGE_KEYS", 12)
    store = MemoryStore(1000 * CHARGE)
    before = world(store)
    for document in "abcdef":
        read(before, document)
    before.flush()
    fresh = disk_tier.DiskTier(store, NAMESPACE)
    fresh.load(fresh.read_index())

    assert not fresh.index.is_loaded
    assert fresh.num_held(0, before.names("f", DOCUMENT)) + fresh.num_held(0, before.names("e", DOCUMENT)) >= 10
    assert fresh.num_held(0, before.names("a", DOCUMENT)) == 0
    while page := fresh.read_index():
        fresh.load(page)
    fresh.load([])
    assert fresh.index.is_loaded
    assert all(fresh.num_held(0, before.names(document, DOCUMENT)) == 10 for document in "abcdef")


class FailingStore(MemoryStore):
    """A store that fails, or hangs, for a while."""

    fails = False
    num_asked = 0

    def read_many(self, keys, outs):  # type: ignore[no-untyped-def]
        self.num_asked += 1
        if self.fails:
            raise OSError(5, "Input/output error")
        return super().read_many(keys, outs)

    def keys(self) -> Iterator[bytes]:
        if self.fails:
            raise OSError(5, "Input/output error")
        return super().keys()


def test_a_disk_that_fails_is_left_alone_and_tried_again_with_one_batch() -> None:
    store = FailingStore(1000 * CHARGE)
    w = world(store)
    for document in "abcdefgh":
        read(w, document)
    disk = w.index.disk
    store.fails = True
    assert balance(read(w, "a"))[3] == DOCUMENT + 1
    for document in "bc":
        read(w, document)
    assert disk.reading.state is BreakerState.OPEN
    asked = store.num_asked

    for document in "ab":
        hit = w.cache.lookup(w.chain(document, DOCUMENT), DOCUMENT + 1)
        assert hit.misses.first(hit.num_tokens) is not Reason.FAILED
        read(w, document)
    assert store.num_asked == asked  # it was not asked

    store.fails = False
    w.clock.now += 2
    assert disk.reading.state is BreakerState.HALF_OPEN
    assert w.cache.lookup(w.chain("h", DOCUMENT), DOCUMENT + 1).num_tokens < DOCUMENT  # no look-up waits for the probe
    w.cache.poll()
    w.settle()
    assert store.num_asked == asked + 1
    assert disk.reading.state is BreakerState.CLOSED
    assert read(w, "h").num_blocks == 10
    w.check()


def restarted_beside_a_store_that_failed() -> World:
    """A tier whose store has a document and could not be read at the start; now it can be, and the rest is over."""
    store = FailingStore(1000 * CHARGE)
    before = world(store)
    read(before, "a")
    before.flush()
    store.fails = True
    after = World.__new__(World)
    with pytest.raises(AssertionError, match="never knows"):
        _start(after, store)
    store.fails = False
    after.clock.now += 100
    return after


def test_an_index_that_could_not_be_read_is_read_later() -> None:
    after = restarted_beside_a_store_that_failed()
    after.settle()
    assert after.cache.lower.status.is_indexed
    assert balance(read(after, "a")) == (0, 0, 40, 1)


def test_an_index_whose_reading_found_its_lane_full_is_read_later() -> None:
    after = restarted_beside_a_store_that_failed()
    after.lanes[Route.DISK_TO_HOST].capacity = 0

    after.settle()  # the probe is refused by the lane
    after.lanes[Route.DISK_TO_HOST].capacity = 6
    after.settle()

    assert after.cache.lower.status.is_indexed
    assert balance(read(after, "a")) == (0, 0, 40, 1)


def _start(w: World, store: MemoryStore) -> None:
    """Make a world that does not wait for ever for its index."""
    tries = iter(range(50))
    settle = World.settle

    def settle_some() -> None:
        if next(tries, None) is None:
            del w.settle
            raise AssertionError("it never knows its disk")
        settle(w)

    w.settle = settle_some  # type: ignore[method-assign]
    w.__init__([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 16, 24, store, random.Random(1))  # type: ignore[misc]


def test_over_the_budget_only_what_is_used_again_is_written() -> None:
    store = MemoryStore(1000 * CHARGE)
    w = world(store, written_bytes_per_day=20 * BLOCK_BYTES, num_host_slots=200)
    for document in "abcdefgh":
        read(w, document)
    w.flush()
    written = store.statistics().written_bytes_total
    assert written <= 40 * BLOCK_BYTES  # a day's, and what was begun
    admission = w.index.admission
    assert admission is not None
    assert admission.statistics().num_refused >= 40

    w.clock.now += 3 * DAY_S
    assert balance(read(w, "e")) == (0, 40, 0, 1)  # from host memory: used again
    w.flush()

    assert all(store.contains(w.index.disk.key(0, name)) for name in w.names("e", DOCUMENT))
    w.check()


def test_what_was_written_before_a_restart_counts() -> None:
    store = MemoryStore(1000 * CHARGE)
    w = world(store)
    for document in "abc":
        read(w, document)
    w.flush()

    w = world(store, written_bytes_per_day=20 * BLOCK_BYTES)

    assert w.index.disk.budget.left_bytes == 0


def test_copies_to_a_disk_that_fails_stop_and_begin_again() -> None:
    store = MemoryStore(1000 * CHARGE)
    w = world(store)
    w.lanes[Route.HOST_TO_DISK].failing = 1.0
    for document in "abcdef":
        read(w, document)
    disk = w.index.disk
    assert disk.is_failing
    assert disk.index.num_blocks == 0
    w.lanes[Route.HOST_TO_DISK].failing = 0.0
    w.clock.now += 100
    for document in "ghij":
        read(w, document)
    assert not disk.is_failing
    assert disk.index.num_blocks > 0
    assert w.cache.statistics().tiers[Tier.DISK].num_blocks >= disk.index.num_blocks


class FullStore(MemoryStore):
    """A store that has room for no block, for a while."""

    is_full = False
    num_asked = 0

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        self.num_asked += 1
        if self.is_full:
            raise StoreFull(28, "No space left on device")
        return super().put_many(blobs)


def test_a_store_that_is_full_freezes_nothing_and_takes_blocks_as_soon_as_it_has_room() -> None:
    store = FullStore(1000 * CHARGE)
    w = world(store, written_bytes_per_day=100 * BLOCK_BYTES)
    read(w, "a")
    disk = w.index.disk
    store.is_full = True
    for document in "bcdefghi":
        read(w, document)  # no request waits for room on disk
    asked = store.num_asked
    assert disk.is_failing
    assert disk.details().why_failed["write"] == "[Errno 28] No space left on device"
    assert asked < 10

    for _ in range(4):
        w.clock.now += 61.0  # longer than any rest
        read(w, "i")
    assert asked < store.num_asked <= asked + 8  # one try after each rest

    store.is_full = False
    w.clock.now += 61.0
    for document in "jkl":
        read(w, document)
    w.flush()

    assert not disk.is_failing
    assert disk.num_held(0, w.names("l", DOCUMENT)) == 10
    w.check()


def test_batches_that_land_in_another_order_never_count_backwards() -> None:
    store = MemoryStore(1000 * CHARGE)
    disk = DiskTier(store, bytes(16), FakeClock(), 1000 * CHARGE)
    blobs = [Blob(disk.key(0, BlockName(bytes([n]) * 32)), digest(b"kv"), memoryview(b"kv")) for n in range(3)]
    first, second, third = [disk.write([blob]) for blob in blobs]
    left = disk.budget.left_bytes

    totals = []
    for written in (second, first, third):
        disk.on_written(written)
        totals.append(disk.details().written_bytes_total)

    assert totals == [4, 4, 6]
    assert left is not None
    assert disk.budget.left_bytes == left - 6


def test_a_store_that_begins_again_gives_no_budget_back() -> None:
    clock = FakeClock()
    store = LateStore(empty())
    disk = DiskTier(store, bytes(16), clock, 1000)  # type: ignore[arg-type]  # it has what a tier asks for
    disk.life = SsdLife(1, clock, 0)
    clock.now += 1.0
    disk.on_written(disk.write([Blob(disk.key(0, BlockName(bytes(32))), digest(b"k" * 600), memoryview(b"k" * 600))]))
    store.begin_again()

    disk.on_written(disk.write([Blob(disk.key(0, BlockName(bytes(32))), digest(b"k" * 300), memoryview(b"k" * 300))]))

    assert disk.budget.left_bytes == 100
    life = disk.details().life
    assert life is not None
    assert life.years_left > 0
