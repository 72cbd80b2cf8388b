"""The log of spills: every batch that was copied down, as it went, and every block that was not."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from chaos import FakeClock, World
from small_cache import BLOCK_BYTES, CHARGE, DOCUMENT, read, world

from kvtier.store.blob_store import Blob, StoreFull
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.lower.purge import PurgeOrder
from kvtier.tiers.lower.spill_log import Drop, Spill, SpillLog
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.tiers.naming.tier import EvictionCause, Tier
from kvtier.transfer.lane import LaneClosed
from kvtier.transfer.transfer_engine import Route

DOWN = (Route.DEVICE_TO_HOST, Route.HOST_TO_DISK)


class FullStore(MemoryStore):
    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        raise StoreFull("no room")


def compute(w: World, document: str) -> None:
    """Compute a document and leave it on the device: nothing is copied down yet."""
    chain = w.chain(document, DOCUMENT)
    tables = w.cache.allocate([len(chain.names)])
    assert tables is not None
    w.compute(tables, chain, 0, DOCUMENT)
    w.cache.release(tables)


def noted(clock: FakeClock | None = None, **options: Any) -> tuple[World, SpillLog]:
    """A world whose spills are noted."""
    clock = FakeClock() if clock is None else clock
    log = SpillLog(clock)
    return world(clock=clock, spills=log, **options), log


def names_on(spills: Sequence[Spill], route: Route) -> Counter[BlockName]:
    return Counter(name for spill in spills if spill.route is route for name in spill.names)


def test_each_block_is_noted_once_on_each_of_its_ways_down() -> None:
    w, log = noted()
    read(w, "a")

    w.flush()

    spills = log.take()
    names = Counter(w.chain("a", DOCUMENT).names)
    assert [names_on(spills, route) for route in DOWN] == [names, names]
    assert [spill.num_bytes for spill in spills] == [BLOCK_BYTES * len(spill.names) for spill in spills]
    assert not any(spill.dropped for spill in spills)
    assert log.take() == []


def test_a_batch_lasts_from_its_start_until_it_is_taken_in_and_its_copy_for_less() -> None:
    w, log = noted()
    compute(w, "a")
    w.clock.now = 10.0

    w.cache.spill()
    w.clock.now = 13.0
    w.settle()

    spills = log.take()
    assert {(spill.began_at, spill.ended_at) for spill in spills} == {(10.0, 13.0)}
    ran = w.cache.statistics().routes[Route.DEVICE_TO_HOST].seconds
    assert sum(spill.copy_s for spill in spills) == pytest.approx(ran)


@pytest.mark.parametrize("route", DOWN)
def test_of_a_copy_that_failed_all_blocks_are_dropped_and_nothing_was_moved(route: Route) -> None:
    w, log = noted()
    w.lanes[route].failing = 1.0

    read(w, "a")
    w.cache.spill()
    w.settle()

    failed = [spill for spill in log.take() if spill.route is route and Drop.FAILED in spill.dropped]
    assert failed
    assert [spill.dropped for spill in failed] == [{Drop.FAILED: len(spill.names)} for spill in failed]
    assert not any(spill.num_bytes for spill in failed)


def test_what_a_full_store_does_not_take_is_dropped_for_that() -> None:
    w, log = noted(store=FullStore(100 * CHARGE))

    read(w, "a")
    w.cache.spill()
    w.settle()

    to_disk = [spill for spill in log.take() if spill.route is Route.HOST_TO_DISK]
    assert to_disk
    assert [spill.dropped for spill in to_disk] == [{Drop.FULL: len(spill.names)} for spill in to_disk]


def test_what_a_tenants_quota_pushes_out_of_the_batch_itself_is_dropped() -> None:
    store = MemoryStore(100 * CHARGE, quotas={tenant_of("a"): 2 * CHARGE})
    w, log = noted(store=store)

    read(w, "a")
    w.flush()

    to_disk = [spill for spill in log.take() if spill.route is Route.HOST_TO_DISK]
    num_written = sum(len(spill.names) for spill in to_disk)
    num_dropped = sum(spill.dropped.get(Drop.PUSHED_OUT, 0) for spill in to_disk)
    assert num_written == DOCUMENT // w.cache.block_size
    assert 0 < num_dropped <= num_written - 2
    assert w.cache.lookups.where(w.chain("a", DOCUMENT)).count(Tier.DISK) <= 2


def test_a_lane_that_ends_drops_what_it_has_not_begun() -> None:
    w, log = noted()
    compute(w, "a")
    w.cache.spill()
    lane = w.lanes[Route.DEVICE_TO_HOST]
    lane.held, queued = [], lane.held
    for transfer in queued:
        transfer.error = LaneClosed()
        w.finished.put(transfer)

    w.cache.close()

    (spill,) = log.take()
    assert (spill.dropped, spill.num_bytes) == ({Drop.CLOSED: len(spill.names)}, 0)


def test_a_block_that_has_to_leave_the_device_before_it_is_copied_is_noted_with_its_cause() -> None:
    w, log = noted(num_device_slots=16)
    w.lanes[Route.DEVICE_TO_HOST].capacity = 0
    compute(w, "a")
    w.clock.now = 1.0
    compute(w, "b")
    w.clock.now = 2.0

    spills = log.take()
    dropped = w.cache.statistics().tiers[Tier.DEVICE].dropped_spills
    assert dropped == 4
    assert sum(names_on(spills, Route.DEVICE_TO_HOST).values()) == dropped
    assert [dict(spill.dropped) for spill in spills] == [{EvictionCause.ROOM: len(spill.names)} for spill in spills]
    assert {(spill.began_at, spill.ended_at, spill.num_bytes) for spill in spills} == {(1.0, 1.0, 0)}


def test_a_block_that_has_to_leave_host_memory_before_it_is_on_disk_is_noted_too() -> None:
    w, log = noted(num_host_slots=12, store=FullStore(100 * CHARGE))

    for document in "abcdef":
        read(w, document)

    spills = [spill for spill in log.take() if spill.route is Route.HOST_TO_DISK and _is_of_an_eviction(spill)]
    dropped = w.cache.statistics().tiers[Tier.HOST].dropped_spills
    assert dropped
    assert sum(spill.dropped[EvictionCause.ROOM] for spill in spills) == dropped


@pytest.mark.parametrize(("tier", "route"), [(Tier.DEVICE, DOWN[0]), (Tier.HOST, DOWN[1])])
def test_what_an_operator_evicts_is_not_dropped(tier: Tier, route: Route) -> None:
    w, log = noted()
    w.lanes[route].capacity = 0
    read(w, "a")
    log.take()

    purge = w.cache.purge(PurgeOrder(frozenset({tier})))
    while not purge.go_on():
        w.clock.now += 1

    assert purge.outcome()[tier].num_blocks
    assert log.take() == []


@pytest.mark.parametrize("failing", [0.0, 0.2])
def test_whatever_happens_the_log_and_the_statistics_tell_the_same(failing: float) -> None:
    seed = random.randrange(1 << 32)
    rng, clock = random.Random(seed), FakeClock()
    log = SpillLog(clock)
    store = MemoryStore(30 * CHARGE)
    groups = [FullAttention(4)]
    w = World(groups, [BLOCK_BYTES], 16, 24, store, rng, failing, clock=clock, spills=log)

    for _ in range(60):
        read(w, rng.choice("abcdefgh"), rng.randrange(5, DOCUMENT + 2))
        clock.now += rng.choice([0, 0, 2.0])

    spills, statistics = log.take(), w.cache.statistics()
    for route in DOWN:
        counts = statistics.routes[route].copies
        own = [spill for spill in spills if spill.route is route and not _is_of_an_eviction(spill)]
        done = [spill for spill in own if Drop.FAILED not in spill.dropped]
        assert (counts.num_done, counts.num_failed) == (len(done), len(own) - len(done)), f"seed {seed}"
        assert counts.num_done_blocks == sum(len(spill.names) for spill in done), f"seed {seed}"
    for tier, route in ((Tier.DEVICE, Route.DEVICE_TO_HOST), (Tier.HOST, Route.HOST_TO_DISK)):
        evicted = [spill for spill in spills if spill.route is route and _is_of_an_eviction(spill)]
        assert statistics.tiers[tier].dropped_spills == sum(len(spill.names) for spill in evicted), f"seed {seed}"


def _is_of_an_eviction(spill: Spill) -> bool:
    return any(isinstance(why, EvictionCause) for why in spill.dropped)
