"""What operators have leave: from every tier, a part at a time, and nothing that is leased."""

import random

import pytest
from chaos import World
from small_cache import BLOCK_BYTES, BLOCK_SIZE, CHARGE, DOCUMENT, read, world
from unreliable_tiers import UnreliableTiers

from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.lower.purge import Purged, PurgeOrder
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.events import BlockRemoved, EventLog
from kvtier.tiers.naming.groups import FullAttention, SlidingWindow
from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.tiers.purge import CachePurge

BLOCKS = DOCUMENT // BLOCK_SIZE

LOCAL = (Tier.DEVICE, Tier.HOST, Tier.DISK)


def everywhere(w, documents: str) -> None:
    """Read these documents, so that host memory and disk have all of them and the device the last ones."""
    for document in documents:
        read(w, document)
    while w.cache.drain.spill_rest():
        w.settle()


def done(w, order: PurgeOrder) -> dict[Tier, Purged]:
    """What the order has evicted, once it is done; the books agree after each part."""
    purge = w.cache.purge(order)
    while not purge.go_on():
        w.clock.now += 0.005
        w.settle()
        w.check()
    return purge.outcome()


def num_found(w, document: str) -> int:
    return sum(tier is not None for tier in w.cache.lookups.where(w.chain(document, DOCUMENT)))


def test_all_that_is_cached_leaves_every_tier_and_is_counted_by_tier() -> None:
    w = world(num_device_slots=32, num_host_slots=64)
    everywhere(w, "ab")

    outcome = done(w, PurgeOrder())

    assert [num_found(w, each) for each in "ab"] == [0, 0]
    assert outcome[Tier.DEVICE].num_blocks >= 2 * BLOCKS  # and tails
    assert outcome[Tier.HOST] == Purged(2 * BLOCKS, 2 * BLOCKS * BLOCK_BYTES)
    assert outcome[Tier.DISK] == Purged(2 * BLOCKS, 2 * BLOCKS * CHARGE)
    assert w.store.statistics().num_records == 0
    for tier, statistics in w.cache.statistics().tiers.items():
        assert statistics.evicted == {EvictionCause.CLEARED: outcome[tier].num_blocks}
        assert statistics.dropped_spills == 0
    assert read(w, "a").num_tokens == 0


def test_a_tenants_blocks_leave_and_nobody_elses() -> None:
    w = world(num_device_slots=32, num_host_slots=64)
    everywhere(w, "ab")

    outcome = done(w, PurgeOrder(tenant=tenant_of("a")))

    assert [num_found(w, each) for each in "ab"] == [0, BLOCKS]
    assert outcome[Tier.HOST].num_blocks == outcome[Tier.DISK].num_blocks == BLOCKS
    assert read(w, "b").num_tokens == DOCUMENT


def poll_all(w) -> None:
    """Poll the cache until it has reported all blocks that a reset evicted."""
    for _ in range(100):
        w.cache.poll()


def how_lost(w, document: str) -> set[tuple[Tier, EvictionCause, float] | None]:
    """By which tier, why and when the document's blocks were lost."""
    found = w.cache.residency.ghosts.find_all(w.chain(document, DOCUMENT).names)
    return {None if each is None else (each.tier, each.cause, each.at) for each in found}


@pytest.mark.parametrize("below", ["nothing", "host memory", "host memory and disk", "a sidecar", "a sidecar, disk"])
def test_what_a_reset_forgets_is_remembered_as_cleared(below: str) -> None:
    store = MemoryStore(100 * CHARGE) if "disk" in below else None
    num_host_slots = 0 if below == "nothing" else 64
    groups = [FullAttention(BLOCK_SIZE)]
    w = World(groups, [BLOCK_BYTES], 32, num_host_slots, store, random.Random(1), is_apart="sidecar" in below)
    everywhere(w, "ab")
    w.clock.now = 77.0

    assert w.cache.reset()
    poll_all(w)

    for document in "ab":
        assert how_lost(w, document) == {(Tier.DEVICE, EvictionCause.CLEARED, 77.0)}
        assert read(w, document).reason_at_end is Reason.EVICTED_FROM_DEVICE


def test_what_a_reset_takes_from_a_tier_below_was_lost_there() -> None:
    w = world(num_device_slots=16, num_host_slots=24)
    everywhere(w, "abcd")
    assert {w.cache.lookups.where(w.chain(document, DOCUMENT))[0] for document in "abcd"} == set(LOCAL)
    w.clock.now = 77.0

    assert w.cache.reset()
    poll_all(w)

    lost = set().union(*(how_lost(w, document) for document in "abcd"))
    assert lost == {(tier, EvictionCause.CLEARED, 77.0) for tier in LOCAL}


@pytest.mark.parametrize("order", [PurgeOrder(), PurgeOrder(tenant=tenant_of("a"))], ids=["everything", "a tenant"])
def test_what_an_operator_has_leave_is_remembered_as_cleared(order: PurgeOrder) -> None:
    w = world(num_device_slots=32, num_host_slots=64)
    everywhere(w, "ab")

    done(w, order)

    (lost,) = how_lost(w, "a")
    assert lost is not None
    assert lost[:2] == (Tier.DISK, EvictionCause.CLEARED)
    assert (how_lost(w, "b") == {None}) == (order.tenant is not None)


@pytest.mark.parametrize(
    ("tier", "others"), [(Tier.DEVICE, {Tier.HOST: 20, Tier.DISK: 20}), (Tier.HOST, {Tier.DISK: 20}), (Tier.DISK, {})]
)
def test_the_oldest_blocks_of_one_tier_leave_that_tier_only(tier: Tier, others: dict[Tier, int]) -> None:
    w = world(num_device_slots=32, num_host_slots=64)
    everywhere(w, "ab")
    size = CHARGE if tier is Tier.DISK else BLOCK_BYTES

    outcome = done(w, PurgeOrder(frozenset({tier}), max_bytes=3 * size))

    assert outcome == {tier: Purged(3, 3 * size)}
    statistics = w.cache.statistics().tiers
    for other, num_blocks in others.items():
        assert statistics[other].num_blocks == num_blocks
    assert num_found(w, "a") == num_found(w, "b") == BLOCKS  # some tier has each
    assert done(w, PurgeOrder(frozenset({tier}), max_blocks=2))[tier].num_blocks == 2


def test_what_a_request_or_a_pin_leases_stays_and_is_counted() -> None:
    w = world(num_device_slots=32, num_host_slots=64)
    everywhere(w, "ab")
    leased = w.cache.promote(w.cache.lookup(w.chain("a", DOCUMENT + 1), DOCUMENT + 1))
    pin = w.cache.pins.pin(w.chain("b", DOCUMENT), DOCUMENT)
    w.settle()
    assert leased.done
    assert pin is not None
    assert pin.is_whole

    outcome = done(w, PurgeOrder())

    assert outcome[Tier.DEVICE].num_leased == BLOCKS
    assert outcome[Tier.HOST].num_leased == BLOCKS
    assert num_found(w, "a") == num_found(w, "b") == BLOCKS
    w.cache.release(leased.tables)
    w.cache.pins.unpin(pin)
    assert done(w, PurgeOrder())[Tier.HOST] == Purged(BLOCKS, BLOCKS * BLOCK_BYTES)


def test_a_block_on_its_way_down_is_evicted_where_it_arrives() -> None:
    w = world(num_device_slots=32, num_host_slots=64)
    chain = w.chain("a", DOCUMENT)
    tables = w.cache.allocate([BLOCKS])
    assert tables is not None
    w.compute(tables, chain, 0, DOCUMENT)
    w.cache.release(tables)
    w.cache.drain.spill_rest()
    assert w.cache.num_in_flight  # the copies are not taken in before the first look has gone by
    purge = w.cache.purge(PurgeOrder())
    for _ in range(3):
        purge.go_on()

    while not purge.go_on():
        w.clock.now += 0.005
        w.settle()

    assert num_found(w, "a") == 0
    assert w.store.statistics().num_records == 0
    w.check()


def test_no_part_evicts_more_than_a_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.purge.PARTS_S", 0)  # the clock stands still
    monkeypatch.setattr("kvtier.tiers.device.slot_purge.MAX_EVICTED", 3)
    monkeypatch.setattr("kvtier.tiers.lower.disk_purge.MAX_EVICTED", 3)
    w = world(num_device_slots=32, num_host_slots=64)
    everywhere(w, "ab")
    purge, before, limit = w.cache.purge(PurgeOrder()), 0, 0

    while not purge.go_on():
        now = sum(each.num_blocks for each in purge.outcome().values())
        before, limit = now, max(limit, now - before)
        w.clock.now += 0.005
        w.settle()

    assert limit == 3


def test_routers_are_told_as_of_any_eviction() -> None:
    events = EventLog()
    w = world(num_device_slots=32, num_host_slots=64, events=events)
    everywhere(w, "a")
    events.take()

    done(w, PurgeOrder(tenant=tenant_of("a")))

    gone: dict[Tier, set[BlockName]] = {tier: set() for tier in LOCAL}
    for event in events.take():
        assert isinstance(event, BlockRemoved)
        assert event.cause is EvictionCause.CLEARED
        gone[event.tier].update(event.names)
    names = set(w.chain("a", DOCUMENT).names)
    assert gone == {Tier.DEVICE: names, Tier.HOST: names, Tier.DISK: names}


def test_of_a_namespace_only_the_disks_records_that_begin_so_leave() -> None:
    store = MemoryStore(100 * CHARGE)
    w = world(num_device_slots=32, num_host_slots=64, store=store)
    everywhere(w, "a")
    own = next(store.keys())[:16].hex()

    assert done(w, PurgeOrder(frozenset({Tier.DISK}), namespace="00")) == {Tier.DISK: Purged()}
    assert done(w, PurgeOrder(frozenset({Tier.DISK}), namespace=own[:6]))[Tier.DISK].num_blocks == BLOCKS
    assert store.statistics().num_records == 0
    assert num_found(w, "a") == BLOCKS  # in host memory


def test_a_disk_that_fails_is_told_in_a_line_and_the_rest_is_done() -> None:
    w = world(num_device_slots=32, num_host_slots=64)
    everywhere(w, "a")
    w.store.close()

    outcome = done(w, PurgeOrder())

    assert outcome[Tier.DISK] == Purged(why_not="store is closed")
    assert outcome[Tier.HOST].num_blocks == BLOCKS


def test_in_all_groups_of_a_hybrid_the_same_number_of_blocks_leaves() -> None:
    from chaos import World

    groups = [SlidingWindow(BLOCK_SIZE, 10), FullAttention(BLOCK_SIZE)]
    w = World(groups, [64, 96], 32, 64, MemoryStore(100 * CHARGE), random.Random(1))
    chain = w.chain("a", DOCUMENT)
    tables = w.cache.allocate([BLOCKS, BLOCKS])
    assert tables is not None
    w.compute(tables, chain, 0, DOCUMENT)
    w.cache.release(tables)

    outcome = done(w, PurgeOrder(frozenset({Tier.DEVICE}), max_bytes=2 * (64 + 96)))

    assert outcome == {Tier.DEVICE: Purged(4, 2 * (64 + 96))}


def test_tiers_that_are_late_lose_their_blocks_too() -> None:
    w = world(num_device_slots=32, num_host_slots=64, is_unreliable=True)
    assert isinstance(w.lower, UnreliableTiers)
    everywhere(w, "a")

    purge: CachePurge = w.cache.purge(PurgeOrder())
    while not purge.go_on():
        w.clock.now += 0.005
        w.settle()

    assert w.store.statistics().num_records == 0
    w.check()
