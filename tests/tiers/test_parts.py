"""Long prefixes come up in parts: no call does more than one."""

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from chaos import World
from small_cache import BLOCK_BYTES, BLOCK_SIZE, CHARGE, compute_and_leave, demand_of, read

from kvtier.store.blob_store import Blob
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import digest
from kvtier.tiers import cache, pins
from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.lower import reads
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.tiers.pins import Pin
from kvtier.tiers.up import promoter, uploads
from kvtier.tiers.up.promotion import Promotion
from kvtier.transfer.transfer_engine import Route

NUM_BLOCKS = 60
DOCUMENT = NUM_BLOCKS * BLOCK_SIZE


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promoter, "PART", 4)
    monkeypatch.setattr(promoter, "MAX_IN_FLIGHT", 10)
    monkeypatch.setattr(pins, "PART", 4)
    monkeypatch.setattr(pins, "MAX_IN_FLIGHT", 10)
    monkeypatch.setattr(promoter, "REFRESH_PART", 4)


def world(num_device_slots: int = 80, num_host_slots: int = 200, **options: object) -> World:
    store = MemoryStore(300 * CHARGE)
    groups = [FullAttention(BLOCK_SIZE)]
    return World(groups, [BLOCK_BYTES], num_device_slots, num_host_slots, store, random.Random(1), **options)


def on_disk(w: World, document: str) -> None:
    """A document that only the disk has."""
    chain, disk = w.chain(document, DOCUMENT), w.index.disk
    for name in chain.names:
        raw = memoryview(w.bytes_of(0, name))
        w.store.put_many([Blob(disk.key(0, name), digest(raw), raw)])
    disk.index.add(0, chain.names)


def promote(w: World, document: str, timeout_s: float | None = None) -> Promotion:
    hit = w.cache.lookup(w.chain(document, DOCUMENT), DOCUMENT + 1)
    assert hit.num_blocks == NUM_BLOCKS
    return w.cache.promote(hit, timeout_s)


def until_done(w: World, promotion: Promotion) -> None:
    for _ in range(200):
        for lane in w.lanes.values():
            lane.stir(1.0)
        w.cache.poll()
        w.check()
        assert len(promotion.waiting) <= 10
        if promotion.done:
            return
    raise AssertionError("a promotion never ended")


def in_host(w: World, document: str) -> None:
    """A document that only host memory has."""
    on_disk(w, document)
    promotion = promote(w, document)
    until_done(w, promotion)
    w.cache.release(promotion.tables)
    w.settle()
    w.cache.residency.groups[0].slots.evict(
        w.cache.residency.groups[0].pool.find_all(promotion.chain.names), EvictionCause.ROOM
    )


@pytest.mark.parametrize("where", [Tier.HOST, Tier.DISK])
def test_a_long_prefix_is_put_under_way_in_parts_and_arrives_whole(where: Tier) -> None:
    w = world()
    (on_disk if where is Tier.DISK else in_host)(w, "a")

    promotion = promote(w, "a")
    num_at_once = len(promotion.waiting)
    until_done(w, promotion)

    assert num_at_once == 4
    tokens = promotion.balance(DOCUMENT + 1)
    assert (tokens.host, tokens.disk) == ((DOCUMENT, 0) if where is Tier.HOST else (0, DOCUMENT))
    w.cache.release(promotion.tables)
    assert w.cache.free_slots() == [80]


def test_who_leaves_a_long_prefix_gives_up_what_is_under_way_and_nothing_of_the_rest_is_begun() -> None:
    w = world()
    on_disk(w, "a")
    promotion = promote(w, "a")

    w.cache.cancel(promotion)
    w.check()

    assert w.cache.free_slots() == [80]
    assert promotion.reason_at_end is Reason.DEADLINE
    w.settle()
    assert sum(tier is not Tier.DISK for tier in w.cache.lookups.where(promotion.chain)) <= 4


def test_slots_of_what_is_to_come_are_given_to_nobody_else() -> None:
    w = world(num_device_slots=70)
    on_disk(w, "a")
    on_disk(w, "b")

    first, second = promote(w, "a"), promote(w, "b")

    assert w.cache.free_slots() == [0]
    assert w.cache.allocate([1]) is None
    assert second.num_blocks == 10
    assert second.reason_at_end is Reason.CAPACITY
    until_done(w, first)
    until_done(w, second)
    assert (first.num_blocks, second.num_blocks) == (NUM_BLOCKS, 10)


def test_a_long_prefix_that_two_want_has_one_slot_for_each_block_and_is_read_once() -> None:
    w = world(num_device_slots=NUM_BLOCKS)
    on_disk(w, "a")

    one, two = promote(w, "a"), promote(w, "a")
    until_done(w, one)
    until_done(w, two)

    assert (one.num_blocks, two.num_blocks) == (NUM_BLOCKS, NUM_BLOCKS)
    assert one.tables == two.tables
    assert w.cache.statistics().routes[Route.DISK_TO_HOST].num_bytes == NUM_BLOCKS * BLOCK_BYTES


@pytest.mark.parametrize("leaving", [0, 1])
def test_when_one_of_two_leaves_the_other_has_all_of_its_long_prefix(leaving: int) -> None:
    w = world(num_device_slots=NUM_BLOCKS)
    on_disk(w, "a")
    promotions = [promote(w, "a"), promote(w, "a")]
    for lane in w.lanes.values():
        lane.stir(1.0)
    w.cache.poll()

    w.cache.cancel(promotions.pop(leaving))
    w.check()
    until_done(w, promotions[0])

    assert promotions[0].num_blocks == NUM_BLOCKS


def test_what_is_computed_before_its_turn_has_come_is_not_loaded() -> None:
    w = world(num_device_slots=2 * NUM_BLOCKS)
    on_disk(w, "a")
    chain = w.chain("a", DOCUMENT)
    promotion = promote(w, "a")
    tables = w.cache.allocate([NUM_BLOCKS])
    assert tables is not None
    w.compute(tables, chain, 0, DOCUMENT)

    until_done(w, promotion)

    assert promotion.num_blocks == NUM_BLOCKS
    assert promotion.tables == tables
    assert w.cache.statistics().routes[Route.DISK_TO_HOST].num_bytes == 4 * BLOCK_BYTES


def test_a_late_long_prefix_is_as_long_as_what_has_arrived_from_its_front() -> None:
    w = world()
    on_disk(w, "a")
    promotion = promote(w, "a", timeout_s=1.0)
    for _ in range(8):
        for lane in w.lanes.values():
            lane.stir(1.0)
        w.cache.poll()

    w.clock.now = 2.0
    w.cache.poll()

    assert promotion.done
    assert 0 < promotion.num_blocks < NUM_BLOCKS
    assert promotion.reason_at_end is Reason.DEADLINE
    w.check()


def test_a_long_prefix_of_which_nothing_was_begun_in_time_is_no_hit() -> None:
    w = world(num_device_slots=3 * NUM_BLOCKS)
    for document in ("a", "b", "late"):
        on_disk(w, document)
    others = [promote(w, document) for document in ("a", "b")]  # each poll goes on with these
    late = promote(w, "late", timeout_s=1.0)

    w.clock.now += 2.0
    w.cache.poll()

    assert (late.done, late.num_blocks, late.reason_at_end) == (True, 0, Reason.DEADLINE)
    for other in others:
        until_done(w, other)


def test_nothing_behind_a_block_that_cannot_be_had_is_begun() -> None:
    w = world()
    on_disk(w, "a")
    w.lanes[Route.DISK_TO_HOST].failing = 1.0

    promotion = promote(w, "a")
    w.lanes[Route.DISK_TO_HOST].stir(1.0)
    w.cache.poll()

    assert promotion.done
    assert promotion.num_blocks == 0
    w.check()


def test_a_long_prefix_comes_by_layers_once_all_of_it_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BY_LAYERS_BYTES", 0)
    w = world(by_layers=True)
    in_host(w, "a")

    promotion = promote(w, "a")
    gates = [promotion.gate]
    while promotion.gate is None:
        assert not w.cache.num_in_flight, "what is to come by layers has begun"
        w.cache.wait(60.0)  # does not wait: there is more to be put under way
    w.settle()

    assert gates == [None]
    assert promotion.done
    assert promotion.num_blocks == NUM_BLOCKS
    w.check()


def test_who_leaves_a_long_prefix_before_it_comes_by_layers_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BY_LAYERS_BYTES", 0)
    w = world(by_layers=True)
    in_host(w, "a")
    promotion, other = promote(w, "a"), promote(w, "a")

    w.cache.cancel(promotion)
    w.check()
    w.settle()

    assert other.done
    assert other.num_blocks == NUM_BLOCKS
    w.check()


def test_host_memory_keeps_what_a_promotion_has_still_to_bring_up() -> None:
    w = world(num_host_slots=100)
    in_host(w, "a")
    promotion = promote(w, "a")
    num_read = w.cache.statistics().routes[Route.DISK_TO_HOST].num_transfers
    assert len(promotion.waiting) == 4

    taken = w.cache.lower.reserve(0, 100)  # by copies down of all that the device has

    assert len(taken) == 100 - NUM_BLOCKS
    until_done(w, promotion)
    assert promotion.balance(DOCUMENT + 1).host == DOCUMENT
    assert w.cache.statistics().routes[Route.DISK_TO_HOST].num_transfers == num_read
    w.cache.lower.abandon(0, taken)
    w.cache.release(promotion.tables)


def test_of_a_long_prefix_that_came_up_host_memory_forgets_the_tail_first() -> None:
    w = world()
    in_host(w, "a")
    promotion = promote(w, "a")
    until_done(w, promotion)
    for _ in range(NUM_BLOCKS):
        w.cache.poll()

    pool = w.index.host[0].pool
    order = [pool.name(slot) for slot in pool.cached_slots()]

    assert [name for name in order if name in promotion.chain.names] == promotion.chain.names[::-1]


def pin(w: World, document: str) -> Pin:
    there = w.cache.pins.pin(w.chain(document, DOCUMENT), DOCUMENT)
    assert there is not None
    return there


def test_a_long_prefix_that_is_held_is_looked_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world()
    on_disk(w, "a")
    asked: list[BlockName] = []
    are_held = DiskTier.are_held

    def counted(disk: DiskTier, group_id: int, names: Sequence[BlockName]) -> npt.NDArray[np.bool_]:
        asked.extend(names)
        return are_held(disk, group_id, names)

    monkeypatch.setattr(DiskTier, "are_held", counted)

    there = pin(w, "a")
    counts = [len(asked)]
    for _ in range(200):
        asked.clear()
        w.clock.now += 0.01
        for lane in w.lanes.values():
            lane.stir(1.0)
        w.cache.poll()
        counts.append(len(asked))
        w.check()

    assert there.is_whole
    assert max(counts) == 4
    assert sum(counts) == NUM_BLOCKS
    w.cache.pins.unpin(there)
    w.check()


def test_every_hold_has_its_turn_beside_a_long_one_that_never_becomes_whole() -> None:
    w = world(num_host_slots=400)
    never = [pin(w, "nowhere"), pin(w, "never")]
    on_disk(w, "a")
    there = pin(w, "a")

    for _ in range(300):
        w.clock.now += 0.01
        w.settle()

    assert there.is_whole
    for each in (*never, there):
        w.cache.pins.unpin(each)
    w.check()


def test_a_long_prefix_pushes_out_only_what_has_a_copy_below() -> None:
    w = world(num_device_slots=80, num_host_slots=400)
    on_disk(w, "a")
    for document in "bcd":
        read(w, document, 25 * BLOCK_SIZE)
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)
    while not w.cache.make_room(hit):
        w.settle()

    promotion = w.cache.promote(hit)
    chain = w.chain("e", 10 * BLOCK_SIZE)
    compute_and_leave(w, w.cache.promote(w.cache.lookups.no_hit(chain, 10 * BLOCK_SIZE)), chain)
    until_done(w, promotion)

    assert w.cache.statistics().tiers[Tier.DEVICE].dropped_spills == 0


def test_a_poll_takes_in_what_has_finished_for_a_moment_only_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(promoter, "PART", NUM_BLOCKS)
    monkeypatch.setattr(promoter, "MAX_IN_FLIGHT", NUM_BLOCKS)
    monkeypatch.setattr(reads, "BATCH_BLOCKS", 10)
    monkeypatch.setattr(uploads, "BATCH_BLOCKS", 10)
    w = world()
    on_disk(w, "a")
    promotion = promote(w, "a")
    w.lanes[Route.DISK_TO_HOST].stir(1.0)
    assert w.cache.num_in_flight == 6
    w.clock.tick_s = cache.TAKING_IN_S  # each look takes as long as taking in may last

    counts = [w.cache.num_in_flight]
    while w.lanes[Route.HOST_TO_DEVICE].num_pending < 6:
        w.cache.wait(60.0)  # does not wait: there is more to be taken in
        counts.append(w.cache.num_in_flight - w.lanes[Route.HOST_TO_DEVICE].num_pending)

    assert counts == [6, 4, 2, 0]
    w.clock.tick_s = 0.0
    w.settle()
    assert promotion.num_blocks == NUM_BLOCKS


@pytest.mark.parametrize("where", [Tier.HOST, Tier.DISK])
def test_what_a_look_up_found_is_not_looked_for_again(where: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    w = world()
    (on_disk if where is Tier.DISK else in_host)(w, "a")
    for _ in range(NUM_BLOCKS):
        w.cache.poll()
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)
    asked: list[int] = []
    find_all = BlockPool.find_all
    monkeypatch.setattr(BlockPool, "find_all", lambda self, names: asked.append(len(names)) or find_all(self, names))

    demand = demand_of(w, hit)
    fits = w.cache.make_room(hit)
    begins_with = w.cache.plans.on_device(hit)
    num_asked = sum(asked)
    promotion = w.cache.promote(hit)

    assert demand is not None
    assert demand.moves[Route.HOST_TO_DEVICE].num_bytes[-1] == NUM_BLOCKS * BLOCK_BYTES
    assert fits
    assert begins_with.num_tokens == 0
    assert num_asked == 0
    assert sum(asked) <= 3 * 4, "more was looked for than what is begun"
    w.cache.cancel(promotion)
    w.check()


def test_what_is_to_come_is_counted_by_who_asks_for_slots_and_by_who_plans_a_load() -> None:
    w = world(num_device_slots=2 * NUM_BLOCKS)
    on_disk(w, "a")
    on_disk(w, "b")
    hit = w.cache.lookup(w.chain("b", DOCUMENT), DOCUMENT + 1)
    w.lanes[Route.DISK_TO_HOST].capacity = 0

    first = promote(w, "a")
    demand = demand_of(w, hit)
    again = demand_of(w, w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1))

    assert w.cache.num_to_come(first) == [NUM_BLOCKS - 4]
    assert w.cache.free_slots() == [NUM_BLOCKS]
    assert demand is not None
    assert again is not None
    num_bytes, queued_bytes = demand.moves[Route.DISK_TO_HOST]
    assert (num_bytes[-1], queued_bytes) == (NUM_BLOCKS * BLOCK_BYTES, NUM_BLOCKS * BLOCK_BYTES)
    assert again.moves[Route.DISK_TO_HOST].num_bytes[-1] == NUM_BLOCKS  # waits for the other's, which counts as queued
    w.cache.cancel(first)
    w.check()


def test_while_a_promotion_wants_room_nothing_is_written_to_disk_in_its_way() -> None:
    w = world(num_device_slots=32, num_host_slots=200)
    w.lanes[Route.HOST_TO_DISK].capacity = 0
    read(w, "a")
    for document in "bcd":
        read(w, document)
    w.lanes[Route.DEVICE_TO_HOST].capacity = 0
    for document in "efg":
        read(w, document)
    for route in (Route.HOST_TO_DISK, Route.DEVICE_TO_HOST):
        w.lanes[route].capacity = 6
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)
    assert w.index.host[0].dirty

    assert not w.cache.make_room(hit)
    w.cache.spill()  # of the same step
    assert w.lanes[Route.DEVICE_TO_HOST].num_pending
    assert not w.lanes[Route.HOST_TO_DISK].num_pending

    w.cache.spill()  # no promotion has asked since
    assert w.lanes[Route.HOST_TO_DISK].num_pending


def test_while_a_promotion_is_under_way_nothing_is_written_to_disk_in_its_way() -> None:
    w = world(num_device_slots=32, num_host_slots=200)
    w.lanes[Route.HOST_TO_DISK].capacity = 0
    for document in "abcd":  # "a" is in host memory then, and not on disk
        read(w, document)
    w.lanes[Route.HOST_TO_DISK].capacity = 6
    promotion = w.cache.promote(w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1))
    assert promotion.waiting

    w.cache.spill()
    assert not w.lanes[Route.HOST_TO_DISK].num_pending

    until_done(w, promotion)
    w.cache.spill()
    assert w.lanes[Route.HOST_TO_DISK].num_pending
