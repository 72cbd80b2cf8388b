"""`TieredCache`, one promise at a time, over real memory and a real store."""

import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from chaos import World
from small_cache import BLOCK_BYTES, BLOCK_SIZE, CHARGE, DOCUMENT, balance, read, world

from kvtier.store.blob_store import Blob, StoreFull
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.lower import copies
from kvtier.tiers.lower.breaker import HUNG_S
from kvtier.tiers.lower.lower_tiers import NOWHERE, Deletion
from kvtier.tiers.naming.groups import FullAttention, SlidingWindow
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.tiers.up.promotion import NO_SLOT
from kvtier.transfer.lane import Transfer
from kvtier.transfer.transfer_engine import Route


def test_release_evicts_the_tail_of_a_prefix_first() -> None:
    w = world(num_device_slots=10)
    read(w, "a")

    assert w.cache.allocate([3]) is not None

    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)
    assert [w.cache.residency.groups[0].pool.find(name) is not None for name in hit.chain.names] == [True] * 7 + [
        False
    ] * 3


def test_lookup_changes_nothing_and_leaves_the_last_token_to_compute() -> None:
    w = world()
    read(w, "a")
    chain = w.chain("a", DOCUMENT)
    order = w.cache.residency.groups[0].pool.cached_slots()

    exact, longer = w.cache.lookup(chain, DOCUMENT), w.cache.lookup(chain, DOCUMENT + 1)

    assert (exact.num_blocks, longer.num_blocks) == (9, 10)
    assert w.cache.residency.groups[0].pool.cached_slots() == order


def test_a_document_comes_back_from_each_tier_that_it_was_pushed_to() -> None:
    w = world(num_device_slots=16, num_host_slots=24)
    first = read(w, "a")
    again = read(w, "a")
    for other in "bc":
        read(w, other)
    from_host = read(w, "a")
    for other in "defgh":
        read(w, other)
    from_disk = read(w, "a")

    assert balance(first) == (0, 0, 0, 41)
    assert balance(again) == (40, 0, 0, 1)
    assert balance(from_host) == (0, 40, 0, 1)
    assert balance(from_disk) == (0, 0, 40, 1)


def test_an_allocation_meets_only_clean_blocks_when_copies_have_time() -> None:
    w = world(num_device_slots=16, num_host_slots=24)

    for i in range(30):
        read(w, f"document {i}")

    tiers = w.cache.statistics().tiers
    assert tiers[Tier.DEVICE].num_evicted > 200
    assert tiers[Tier.DEVICE].dropped_spills == 0
    assert tiers[Tier.HOST].dropped_spills == 0


def test_an_allocation_does_not_wait_for_a_copy_and_counts_what_it_drops() -> None:
    w = world(num_device_slots=10)
    read(w, "a")
    w.lanes[Route.DEVICE_TO_HOST].capacity = 0  # as after a failed copy: nothing goes down
    for table in (w.cache.allocate([5]), w.cache.allocate([5])):
        assert table is not None
        w.compute(table, w.chain("b", 20), 0, 20)
        w.cache.release(table)

    assert w.cache.allocate([10]) is not None

    assert w.cache.statistics().tiers[Tier.DEVICE].dropped_spills > 0


def blocks_leaving(w: World) -> int:
    """On their way from the device to host memory."""
    return sum(transfer.num_bytes for transfer in w.lanes[Route.DEVICE_TO_HOST].held) // BLOCK_BYTES


def test_copies_ahead_of_need_leave_the_bus_to_promotions() -> None:
    w = world(num_device_slots=32, num_host_slots=60)
    read(w, "a")
    w.flush()
    w.cache.residency.groups[0].slots.evict(w.cache.residency.groups[0].pool.cached_slots(), EvictionCause.ROOM)
    for document in "bc":
        table = w.cache.allocate([10])
        assert table is not None
        w.compute(table, w.chain(document, DOCUMENT), 0, DOCUMENT)
        w.cache.release(table)
    window = w.cache.statistics().clean_ahead_blocks
    assert window == 8

    promotion = w.cache.promote(w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1))
    assert w.lanes[Route.HOST_TO_DEVICE].num_pending
    w.cache.spill()
    meanwhile = blocks_leaving(w)
    w.settle()
    w.cache.spill()

    assert meanwhile == window // 2
    assert blocks_leaving(w) >= window // 2  # the other half
    w.settle()
    w.cache.release(promotion.tables)
    w.check()


def test_a_block_wanted_by_two_is_under_way_once() -> None:
    w = world(num_device_slots=16, num_host_slots=40)
    read(w, "a")
    read(w, "b")
    read(w, "c")
    chain = w.chain("a", DOCUMENT)
    hit = w.cache.lookup(chain, DOCUMENT + 1)
    moved = w.cache.statistics().routes[Route.HOST_TO_DEVICE].num_bytes

    one, two = w.cache.promote(hit), w.cache.promote(hit)
    w.settle()

    assert one.done
    assert two.done
    assert one.tables == two.tables
    assert w.cache.statistics().routes[Route.HOST_TO_DEVICE].num_bytes - moved == 10 * BLOCK_BYTES
    w.cache.release(one.tables)
    w.check()
    w.cache.release(two.tables)
    w.check()


def test_a_promotion_through_a_host_smaller_than_the_document_arrives_in_portions(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, 100 * CHARGE) as store:
        large = world(num_device_slots=16, num_host_slots=40, store=store)
        read(large, "a")
        assert large.cache.drain.flush(10, stirring(large)) == 0
        small = world(num_device_slots=16, num_host_slots=3, store=store)

        promotion = read(small, "a")

    assert balance(promotion) == (0, 0, 40, 1)


def stirring(world: World):
    """A callback for `flush` that lets copies finish: the world's lanes do that only when stirred."""

    def progress(num_left: int) -> None:
        world.clock.now += 0.01
        for lane in world.lanes.values():
            lane.stir(1.0)

    return progress


def test_a_flushed_cache_is_warm_after_a_restart(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, 100 * CHARGE) as store:
        before = world(store=store)
        read(before, "a")
        assert before.cache.drain.flush(10, stirring(before)) == 0
    with LmdbStore(tmp_path, 100 * CHARGE) as store:
        after = world(store=store)

        promotion = read(after, "a")

    assert balance(promotion) == (0, 0, 40, 1)


def test_a_damaged_host_block_is_a_shorter_prefix_with_its_reason() -> None:
    w = world()
    read(w, "a")
    read(w, "b")
    read(w, "c")
    slot = w.index.host[0].pool.find(w.names("a", DOCUMENT)[6])
    assert slot is not None
    w.memories[0].host_block(slot)[5] ^= 1

    promotion = read(w, "a")

    assert balance(promotion) == (0, 24, 0, 17)
    assert promotion.balance(41).reasons == {Reason.CORRUPT: 16, Reason.LAST_BLOCK: 1}
    assert w.cache.statistics().tiers[Tier.HOST].corrupt == {"corrupt": 1}


@pytest.mark.parametrize("route", [Route.HOST_TO_DEVICE, Route.DISK_TO_HOST])
def test_a_copy_that_failed_publishes_nothing_and_the_next_try_finds_the_block_where_it_was(route: Route) -> None:
    w = world(num_device_slots=16, num_host_slots=24)
    for document in "abc" if route is Route.HOST_TO_DEVICE else "abcdefgh":
        read(w, document)
    chain = w.chain("a", DOCUMENT)
    w.lanes[route].failing = 1.0

    promotion = w.cache.promote(w.cache.lookup(chain, DOCUMENT + 1))
    w.settle()

    assert promotion.done
    assert promotion.num_blocks == 0
    assert promotion.reason_at_end is Reason.FAILED
    w.check()
    w.lanes[route].failing = 0.0
    w.clock.now += 2  # the disk's rest
    assert balance(read(w, "a"))[3] == 1


def test_a_late_promotion_is_done_with_what_has_arrived() -> None:
    w = world()
    for document in "abc":
        read(w, document)
    chain = w.chain("a", DOCUMENT)
    promotion = w.cache.promote(w.cache.lookup(chain, DOCUMENT + 1), timeout_s=1.0)
    w.cache.poll()
    assert not promotion.done

    w.clock.now += 1.5
    w.cache.poll()

    assert promotion.done
    assert promotion.num_blocks == 0
    assert promotion.reason_at_end is Reason.DEADLINE
    w.check()
    w.settle()  # what comes too late is kept for the next one
    assert w.cache.lookup(chain, DOCUMENT + 1).num_blocks == 10
    w.check()


def test_a_hit_larger_than_what_is_free_is_cut_to_what_fits() -> None:
    w = world(num_device_slots=16)
    read(w, "a")
    read(w, "b")
    for _ in range(9):
        assert w.cache.allocate([1]) is not None
        w.cache.spill()
        w.settle()
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)

    promotion = w.cache.promote(hit)
    w.settle()

    assert promotion.num_blocks == 7
    assert promotion.reason_at_end is Reason.CAPACITY
    w.check()


def test_reset_is_refused_while_anything_is_leased_and_forgets_every_tier() -> None:
    w = world()
    read(w, "a")
    held = w.cache.allocate([1])
    assert held is not None
    assert not w.cache.reset()
    w.cache.release(held)

    assert w.cache.reset()

    assert w.cache.lookups.where(w.chain("a", DOCUMENT)) == [None] * 10
    assert balance(read(w, "a")) == (0, 0, 0, 41)


class BrokenStore(MemoryStore):
    """A disk on which writing fails for a while."""

    broken = True

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        if self.broken:
            raise OSError(28, "No space left on device")
        return super().put_many(blobs)


def test_a_disk_that_cannot_be_written_leaves_the_tiers_above_working_and_is_used_again_later() -> None:
    store = BrokenStore(100 * CHARGE)
    w = world(num_device_slots=16, num_host_slots=24, store=store)
    for document in "abcdef":
        read(w, document)
    without_disk = read(w, "f")
    from_host = read(w, "e")
    assert w.cache.statistics().tiers[Tier.DISK].num_blocks == 0

    store.broken = False
    w.clock.now += 10
    for document in "ghij":
        read(w, document)

    assert balance(without_disk) == (40, 0, 0, 1)
    assert balance(from_host)[3] == 1
    assert w.cache.statistics().routes[Route.HOST_TO_DISK].num_failed > 0
    assert w.cache.statistics().tiers[Tier.DISK].num_blocks > 0


def test_windowed_groups_need_only_their_last_blocks_and_lease_no_others() -> None:
    groups = [SlidingWindow(BLOCK_SIZE, 8), FullAttention(BLOCK_SIZE)]
    w = World(groups, [BLOCK_BYTES, BLOCK_BYTES], 32, 40, MemoryStore(100 * CHARGE), random.Random(1))
    chain = w.chain("a", DOCUMENT)
    read(w, "a")

    promotion = w.cache.promote(w.cache.lookup(chain, DOCUMENT + 1))

    assert promotion.num_blocks == 10
    assert promotion.tables[0][:8].tolist() == [NO_SLOT] * 8
    assert NO_SLOT not in promotion.tables[0][8:] + promotion.tables[1]
    w.cache.release(promotion.tables)
    w.check()


def test_a_disk_without_a_host_tier_to_land_in_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a host tier"):
        world(num_host_slots=0)


def test_a_step_s_worth_of_large_blocks_is_spilled_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "BATCH_BYTES", BLOCK_BYTES)  # a batch is one block, as with blocks of 8 MiB
    w = world(num_device_slots=64, num_host_slots=200)
    w.lanes[Route.DEVICE_TO_HOST].capacity = 64
    chain = w.chain("a", 4000)

    for start in range(0, 400, 8):  # eight blocks a step, and between steps one call of spill
        table = w.cache.allocate([8])
        assert table is not None
        w.compute([array("i", [NO_SLOT] * start) + table[0]], chain, start * BLOCK_SIZE, (start + 8) * BLOCK_SIZE)
        w.cache.release(table)
        w.cache.spill()
        w.settle()

    assert w.cache.statistics().tiers[Tier.DEVICE].dropped_spills == 0


def test_what_the_host_had_no_slot_for_is_copied_down_when_it_has() -> None:
    w = world(num_device_slots=80, num_host_slots=4)
    tables = w.cache.allocate([40])  # more than is looked at ahead of need
    assert tables is not None
    w.compute(tables, w.chain("a", 40 * BLOCK_SIZE), 0, 40 * BLOCK_SIZE)
    w.cache.release(tables)
    w.flush()
    lost = w.cache.residency.groups[0].pool.cached_slots()[:6]
    w.store.delete(list(w.store.keys()))
    w.index.disk.index.empty()
    w.cache.residency.groups[0].slots.on_copies_lost(lost)

    for _ in range(12):  # nothing is allocated meanwhile
        w.cache.spill()
        w.settle()

    assert w.store.statistics().num_records >= 6
    w.check()


def test_nobody_waits_for_room_behind_a_disk_that_hangs_and_a_hit_on_the_device_for_no_disk_at_all() -> None:
    w = world(num_device_slots=16, num_host_slots=24)
    for document in "abc":
        read(w, document)
    w.lanes[Route.DEVICE_TO_HOST].capacity = 0
    table = w.cache.allocate([6])
    assert table is not None
    w.compute(table, w.chain("new", 24), 0, 24)
    w.cache.release(table)
    w.index.host[0].on_copies_lost(w.index.host[0].pool.cached_slots()[:2])
    w.store.delete(list(w.store.keys()))
    w.index.disk.index.empty()
    w.cache.spill()  # a write to disk that will not end: the test does not stir its lane
    below = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)
    on_device = w.cache.lookup(w.chain("c", DOCUMENT), DOCUMENT + 17)
    assert w.cache.plans.on_device(on_device).num_tokens == on_device.num_tokens > 0

    is_below_ready, is_on_device_ready = w.cache.make_room(below), w.cache.make_room(on_device)
    w.clock.now += 2

    assert (is_below_ready, is_on_device_ready) == (False, True)
    assert w.cache.make_room(below)


def test_a_hit_on_the_device_waits_for_copies_when_its_own_blocks_were_all_that_was_copied_ahead() -> None:
    w = world(num_device_slots=16, num_host_slots=24)
    read(w, "a")
    w.lanes[Route.DEVICE_TO_HOST].capacity = 0
    table = w.cache.allocate([6])
    assert table is not None
    w.compute(table, w.chain("new", 24), 0, 24)
    w.cache.release(table)
    w.lanes[Route.DEVICE_TO_HOST].capacity = 6
    cold = w.cache.lookup(w.chain("cold", DOCUMENT), DOCUMENT + 1)
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 17)

    is_cold_ready = w.cache.make_room(cold)
    waits = 0
    while not w.cache.make_room(hit):
        waits += 1
        w.settle()
    w.cache.promote(hit)
    for _ in range(4):
        assert w.cache.allocate([1]) is not None
        w.cache.spill()
        w.settle()

    assert is_cold_ready
    assert 1 <= waits <= 3
    assert w.cache.statistics().tiers[Tier.DEVICE].dropped_spills == 0


def test_a_read_that_hangs_keeps_no_device_slot_and_the_disk_is_left_alone_for_a_while() -> None:
    w = world(num_device_slots=16, num_host_slots=24)
    for document in "abcdefgh":
        read(w, document)
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)
    promotion = w.cache.promote(hit, timeout_s=1.0)

    w.clock.now += 1.5
    w.cache.poll()

    assert promotion.done
    assert w.cache.free_slots() == [16]
    assert w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1).num_blocks == 0
    w.check()
    w.settle()
    w.check()
    w.clock.now += 10
    assert w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1).num_blocks == 10


def test_what_is_read_from_disk_is_the_last_to_be_evicted_there() -> None:
    w = world(num_device_slots=16, num_host_slots=24, store=MemoryStore(64 * CHARGE))

    for i in range(8):
        read(w, "kept")
        for j in range(4):
            read(w, f"passing {i} {j}")

    assert balance(read(w, "kept"))[3] == 1


def test_after_a_promotion_the_host_evicts_the_tail_first_too() -> None:
    w = world(num_device_slots=16, num_host_slots=24)
    for document in "abcdefgh":
        read(w, document)

    read(w, "a")

    host = w.index.host[0].pool
    order = [host.name(slot) for slot in host.cached_slots()]
    places = [order.index(name) for name in w.names("a", DOCUMENT) if name in order]
    assert len(places) == 10
    assert places == sorted(places, reverse=True)


def test_a_disk_smaller_than_the_host_comes_to_rest() -> None:
    w = world(num_device_slots=16, num_host_slots=60, store=MemoryStore(20 * CHARGE))
    for document in "abcdef":
        read(w, document)
    for _ in range(20):
        w.cache.spill()
        w.settle()
    written = w.cache.statistics().routes[Route.HOST_TO_DISK].num_bytes

    for _ in range(50):
        w.cache.spill()
        w.settle()

    assert w.cache.statistics().routes[Route.HOST_TO_DISK].num_bytes == written
    w.check()


def test_a_record_that_left_the_disk_meanwhile_is_a_miss_and_not_corrupt() -> None:
    w = world(num_device_slots=16, num_host_slots=24)
    for document in "abcdefgh":
        read(w, document)
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)
    w.store.delete(list(w.store.keys()))

    promotion = w.cache.promote(hit)
    w.settle()

    assert promotion.num_blocks == 0
    assert promotion.reason_at_end is Reason.EVICTED_FROM_DISK
    assert sum(w.cache.statistics().tiers[Tier.DISK].corrupt.values()) == 0


def test_a_hit_that_is_out_of_date_is_a_shorter_promotion() -> None:
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 16, 12, None, random.Random(1))
    read(w, "a")
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)
    for document in "bcd":
        read(w, document)

    promotion = w.cache.promote(hit)
    w.settle()

    assert hit.num_blocks == 10
    assert promotion.num_blocks < 10
    w.check()


def test_a_flush_gives_up_on_a_disk_that_cannot_be_written() -> None:
    w = world(store=BrokenStore(100 * CHARGE))
    read(w, "a")
    asked: list[int] = []

    def progress(num_left: int) -> None:
        asked.append(num_left)
        stirring(w)(num_left)
        w.clock.now += 1

    assert w.cache.drain.flush(1000, progress) > 0
    assert len(asked) < 50


def test_a_flush_does_not_wait_for_host_slots_that_others_keep() -> None:
    w = world(num_device_slots=40)
    table = w.cache.allocate([10])
    assert table is not None
    w.compute(table, w.chain("a", DOCUMENT), 0, DOCUMENT)
    w.cache.release(table)
    kept = w.lower.reserve(0, 40)  # all there are
    began_at = w.clock.now

    def progress(num_left: int) -> None:
        w.settle()
        w.clock.now += 1

    assert w.cache.drain.flush(1000, progress) == 10
    assert HUNG_S < w.clock.now - began_at < 2 * HUNG_S
    w.lower.abandon(0, np.array(kept))
    assert w.cache.drain.flush(1000, progress) == 0


class UnforgettingStore(MemoryStore):
    def delete(self, keys: Sequence[bytes]) -> int:
        raise OSError("the disk does not answer")


def test_a_reset_whose_records_the_store_does_not_delete_says_so_and_nothing_is_found_all_the_same() -> None:
    w = world(store=UnforgettingStore(100 * CHARGE))
    read(w, "a")
    w.flush()

    assert w.cache.reset()
    assert w.cache.deletion is Deletion.IN_PROGRESS
    w.settle()

    assert w.cache.deletion is Deletion.FAILING
    assert w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1).num_tokens == 0
    w.check()


def test_a_reset_is_refused_and_changes_nothing_while_the_disk_is_known_to_fail() -> None:
    w = world(store=BrokenStore(100 * CHARGE))
    read(w, "a")
    pin = w.cache.pins.pin(w.chain("a", DOCUMENT), DOCUMENT)
    assert pin is not None
    while not w.index.disk.is_failing:
        w.clock.now += 1
        w.cache.spill()
        w.settle()
    assert pin.is_whole

    assert not w.cache.reset()

    assert w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1).num_tokens == DOCUMENT
    assert pin.is_whole
    w.check()


def test_nothing_of_a_reset_is_on_disk_once_its_deletion_is_done() -> None:
    w = world()
    for document in "abc":
        read(w, document)
    w.flush()
    assert w.store.statistics().num_records

    assert w.cache.reset()
    read(w, "d")  # the cache serves requests meanwhile
    w.flush()
    while w.cache.deletion is not Deletion.DONE:
        w.settle()

    after = world(store=w.store)
    after.settle()
    found = {document: after.cache.lookup(w.chain(document, DOCUMENT), DOCUMENT + 1).num_tokens for document in "abcd"}
    assert found == {"a": 0, "b": 0, "c": 0, "d": DOCUMENT}


def two_writes_under_way(w: World) -> list[Transfer]:
    """Four documents of two blocks on their way to disk, two batches of two documents."""
    lane = w.lanes[Route.HOST_TO_DISK]
    for document in "abcd":
        chain, table = w.chain(document, 2 * BLOCK_SIZE), w.cache.allocate([2])
        assert table is not None
        w.compute(table, chain, 0, 2 * BLOCK_SIZE)
        w.cache.release(table)
        pin = w.cache.pins.pin(chain, 2 * BLOCK_SIZE)  # copies down what is on the device only
        assert pin is not None
        w.cache.pins.unpin(pin)
        w.lanes[Route.DEVICE_TO_HOST].stir(1.0)
        w.cache.poll()
        w.cache.spill()
    writes, lane.held = lane.held, []
    assert len(writes) >= 2
    return writes


@pytest.mark.parametrize("order", [1, -1])
def test_what_one_write_evicted_of_another_is_not_said_to_be_on_disk_whichever_is_told_first(order: int) -> None:
    w = world(num_device_slots=16, num_host_slots=16, store=MemoryStore(2 * CHARGE))
    writes = two_writes_under_way(w)

    for transfer in writes:  # the store does them in order
        transfer.run()
    for transfer in writes[::order]:
        w.finished.put(transfer)
    w.cache.poll()

    disk = w.index.disk
    on_disk = {disk.block_of(key) for key in w.store.keys()}  # noqa: SIM118  # no dict
    names = [name for document in "abcd" for name in w.names(document, 2 * BLOCK_SIZE)]
    assert on_disk
    assert {(0, name) for name in names if disk.index.holds(0, name)} == on_disk
    w.check()


def test_the_reasons_of_a_hit_that_went_out_of_date_add_up() -> None:
    groups = [FullAttention(BLOCK_SIZE)]
    w = World(groups, [BLOCK_BYTES], 8, 0, None, random.Random(1))
    chain = w.chain("a", 18)
    tables = w.cache.allocate([5])
    w.compute(tables, chain, 0, 18)
    w.cache.release(tables)
    hit = w.cache.lookup(chain, 18)
    w.cache.release(w.cache.allocate([8]))  # another request takes the slots

    tokens = w.cache.promote(hit).balance(18)

    assert (tokens.recomputed, tokens.reasons) == (18, {Reason.LAST_BLOCK: 2, Reason.EVICTED_FROM_DEVICE: 16})


def test_what_a_full_store_evicted_in_vain_is_dirty_again() -> None:
    class FullStore(MemoryStore):
        is_full = False

        def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
            if self.is_full:
                error = StoreFull("no room")
                error.evicted = list(self.keys())
                self.delete(error.evicted)
                raise error
            return super().put_many(blobs)

    store = FullStore(100 * CHARGE)
    w = world(num_device_slots=16, num_host_slots=12, store=store, min_clean_ahead=16)
    read(w, "a")
    w.cache.drain.flush(10, stirring(w))
    store.is_full = True
    read(w, "other", DOCUMENT // 2 + 1)
    for _ in range(12):
        w.cache.spill()
        w.settle()

    w.check()
    group = w.cache.residency.groups[0]
    on_device = [name for name in w.names("a", DOCUMENT) if group.pool.find(name) is not None]
    found = w.cache.lower.find(group.id, on_device)
    below = [name for name, place in zip(on_device, found, strict=True) if place != NOWHERE]
    dirty = [group.pool.name(slot) for slot in group.slots.dirty.oldest(16)]
    last_copies = set(on_device) - set(below)
    assert last_copies
    assert last_copies <= set(dirty)


def test_a_block_that_left_host_memory_on_its_way_up_and_came_again_is_not_taken_for_the_one_that_left() -> None:
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 16, 40, None, random.Random(1), min_clean_ahead=16)
    for document in "abc":
        read(w, document)
    chain = w.chain("a", DOCUMENT + 1)
    upload = w.cache.promote(w.cache.lookup(chain, DOCUMENT + 1))
    assert not upload.done
    w.evict_blocks(chain.names)
    again = w.cache.promote(w.cache.lookups.no_hit(chain, DOCUMENT + 1))
    slots = w.cache.allocate([1])
    assert slots is not None
    w.compute(slots, chain, 0, BLOCK_SIZE)
    w.cache.release(slots)
    for _ in range(8):
        w.cache.spill()
        w.lanes[Route.DEVICE_TO_HOST].stir(1.0)
        w.cache.poll()
    host = w.index.host
    assert host is not None
    assert host[0].pool.find(chain.names[0]) is not None

    w.settle()

    assert upload.done
    for promotion in (upload, again):
        w.cache.release(promotion.tables)
    w.check()
