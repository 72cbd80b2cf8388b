"""What one mishap may cost: a lane that is full, a copy below that is gone, a block that is forgotten on its way."""

from collections.abc import Sequence
from itertools import count, pairwise

import numpy as np
import pytest
from chaos import World
from pinned_blocks import held, host_blocks, on_disk_only, until_whole
from small_cache import BLOCK_BYTES, BLOCK_SIZE, CHARGE, DOCUMENT, balance, read, world
from store_cases import rot

from kvtier.store.blob_store import Blob, StoreFull
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.down.host_spill import BACK_OFF_S
from kvtier.tiers.lower import reads
from kvtier.tiers.lower.breaker import MAX_FAILURES, REST_S
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import FullAttention, SlidingWindow
from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.tiers.residency import LOST_AT_ONCE
from kvtier.tiers.up import uploads
from kvtier.tiers.up.promotion import Promotion
from kvtier.transfer.transfer_engine import Route, RouteStatistics

NUM_BLOCKS = DOCUMENT // BLOCK_SIZE


def breakers(w: World) -> dict[str, str]:
    disk = w.cache.statistics().disk
    assert disk is not None
    return dict(disk.breakers)


def promote(w: World, document: str, timeout_s: float | None = None) -> Promotion:
    chain = w.chain(document, DOCUMENT)
    return w.cache.promote(w.cache.lookup(chain, DOCUMENT + 1), timeout_s)


def places(w: World, document: str) -> list[Tier | None]:
    return w.cache.lookups.where(w.chain(document, DOCUMENT))


def leave_the_device(w: World, document: str) -> None:
    """Answer other prompts, every copy having its time, until the device has nothing of the document."""
    for number in count():
        if Tier.DEVICE not in places(w, document):
            return
        assert number < 20, "the document never leaves the device"
        read(w, f"passing {number}")


def test_a_probe_that_found_its_lane_full_is_tried_again() -> None:
    w = world(num_device_slots=16, num_host_slots=40)
    on_disk_only(w, "a")
    w.lanes[Route.DISK_TO_HOST].failing = 1.0
    for _ in range(MAX_FAILURES):
        failed = promote(w, "a")
        w.settle()
        w.cache.release(failed.tables)
    assert breakers(w)["read"] == "open"
    w.lanes[Route.DISK_TO_HOST].failing = 0.0
    w.clock.now += REST_S
    assert breakers(w)["read"] == "half_open"

    w.lanes[Route.DISK_TO_HOST].capacity = 0
    w.cache.poll()
    w.lanes[Route.DISK_TO_HOST].capacity = 6
    w.cache.poll()
    w.settle()
    assert breakers(w)["read"] == "closed"
    promotion = promote(w, "a")
    w.settle()

    assert promotion.done
    assert balance(promotion) == (0, 0, DOCUMENT, 1)
    w.cache.release(promotion.tables)
    w.check()


def test_a_write_that_found_its_lane_full_leaves_the_probe_to_the_next() -> None:
    w = world(num_device_slots=16, num_host_slots=40)
    w.lanes[Route.HOST_TO_DISK].failing = 1.0
    for document in "abcd":
        read(w, document)
    assert breakers(w)["write"] == "open"
    w.lanes[Route.HOST_TO_DISK].failing = 0.0
    w.clock.now += REST_S
    assert breakers(w)["write"] == "half_open"

    w.lanes[Route.HOST_TO_DISK].capacity = 0
    w.cache.spill()
    w.cache.poll()
    w.lanes[Route.HOST_TO_DISK].capacity = 6
    for _ in range(3):
        w.cache.spill()
        w.settle()

    assert breakers(w)["write"] == "closed"
    assert w.cache.statistics().tiers[Tier.DISK].num_blocks > 0
    w.check()


@pytest.fixture
def by_layers(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world in which document "a" is in host memory only, and comes up layer by layer."""
    monkeypatch.setattr(uploads, "BY_LAYERS_BYTES", 0)
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 16, 40, None, world().rng, by_layers=True)
    read(w, "a")
    leave_the_device(w, "a")
    assert places(w, "a") == [Tier.HOST] * NUM_BLOCKS
    return w


def test_blocks_that_could_not_be_verified_beside_their_copies_are_not_published(
    by_layers: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = by_layers
    chain = w.chain("a", DOCUMENT)
    slot = w.index.host[0].pool.find(chain.names[3])
    assert slot is not None
    w.memories[0].host_block(slot)[0] ^= 1
    w.rotten.add((0, slot))

    promotion = promote(w, "a")
    assert promotion.gate is not None
    with monkeypatch.context() as patch:
        patch.setattr(w.memories[0], "host_block", fail)  # what verifies reads blocks, what copies does not
        w.settle()

    assert promotion.done
    assert (promotion.num_blocks, promotion.failure) == (0, Reason.FAILED)
    assert w.cache.free_slots() == [16]
    assert places(w, "a")[3] is Tier.HOST  # nobody has seen that it is damaged
    w.check()


def fail(slot: int) -> memoryview:
    raise OSError("the block cannot be read")


def test_a_prefix_whose_layer_was_not_waited_for_counts_for_nothing(by_layers: World) -> None:
    w = by_layers
    promotion = promote(w, "a")
    assert promotion.gate is not None

    promotion.gate.wait(0, 4, give_up_at=0.0)  # the time is over: the step goes on with what is in the slots
    w.settle()

    assert promotion.done
    assert (promotion.num_blocks, promotion.failure) == (0, Reason.FAILED)
    assert w.cache.free_slots() == [16]
    w.check()
    assert balance(read(w, "a")) == (0, DOCUMENT, 0, 1)


@pytest.mark.parametrize("disk", [False, True])
def test_a_device_block_whose_host_copy_was_evicted_is_copied_down_again_before_it_goes(disk: bool) -> None:
    store = MemoryStore(100 * CHARGE) if disk else None
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 40, 20, store, world().rng)
    w.lanes[Route.HOST_TO_DISK].failing = 1.0
    for document in "abc":  # a host of two documents, into each of which one is brought
        read(w, document)
        pin = held(w, document)
        until_whole(w, pin)
        w.cache.pins.unpin(pin)
    assert host_blocks(w, "a") == 0
    assert places(w, "a") == [Tier.DEVICE] * NUM_BLOCKS

    leave_the_device(w, "a")

    assert places(w, "a") == [Tier.HOST] * NUM_BLOCKS
    if not disk:  # else the other document loses its last copy to this one's
        assert w.cache.statistics().tiers[Tier.DEVICE].dropped_spills == 0


@pytest.mark.parametrize("fault", ["missing", "corrupt"])
def test_a_device_block_whose_record_was_found_bad_is_copied_down_again_before_it_goes(fault: str) -> None:
    store = MemoryStore(100 * CHARGE)
    w = world(num_device_slots=40, num_host_slots=20, store=store)
    read(w, "a")
    w.flush()
    for document in "bc":  # host memory forgets the document, the device does not
        read(w, document)
        pin = held(w, document)
        until_whole(w, pin)
        w.cache.pins.unpin(pin)
    w.flush()
    assert host_blocks(w, "a") == 0
    assert places(w, "a") == [Tier.DEVICE] * NUM_BLOCKS
    if fault == "missing":
        store.delete(list(store.keys()))
    else:
        for key in list(store.keys()):
            rot(store, key, w.rng)

    pin = held(w, "a")
    w.settle()  # the records are read, and found bad
    w.cache.pins.unpin(pin)
    w.check()
    found = w.cache.statistics().tiers[Tier.DISK].corrupt
    assert sum(found.values()) == (0 if fault == "missing" else NUM_BLOCKS)
    leave_the_device(w, "a")

    assert all(tier is not None for tier in places(w, "a"))
    assert w.cache.statistics().tiers[Tier.DEVICE].dropped_spills == 0
    assert balance(read(w, "a"))[3] == 1


def test_a_held_block_whose_read_failed_is_not_whole_and_is_read_again() -> None:
    w = world(num_device_slots=16, num_host_slots=40)
    on_disk_only(w, "a")
    w.lanes[Route.DISK_TO_HOST].failing = 1.0
    pin = held(w, "a")
    w.cache.poll()
    w.settle()
    assert not pin.is_whole
    assert host_blocks(w, "a") == 0

    w.lanes[Route.DISK_TO_HOST].failing = 0.0
    until_whole(w, pin)

    assert host_blocks(w, "a") == NUM_BLOCKS
    w.cache.pins.unpin(pin)
    w.check()


def test_a_block_that_was_forgotten_on_its_way_to_disk_leaves_no_mark_on_who_comes_after_it() -> None:
    w = world(num_device_slots=16, num_host_slots=40)
    read(w, "a")
    pin = held(w, "a")
    for _ in range(10):
        w.clock.now += 0.1
        w.cache.poll()
        w.lanes[Route.DEVICE_TO_HOST].stir(1.0)
    w.cache.poll()
    w.cache.spill()
    assert w.lanes[Route.HOST_TO_DISK].num_pending > 0
    w.cache.pins.unpin(pin)

    w.evict_blocks(w.chain("a", DOCUMENT).names)
    w.settle()

    assert host_blocks(w, "a") == 0
    assert w.cache.free_slots() == [16]
    w.check()


@pytest.mark.parametrize("is_told_before_it_comes", [False, True])
def test_a_block_whose_copy_below_went_while_it_came_up_is_copied_down_again(is_told_before_it_comes: bool) -> None:
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 16, 40, None, world().rng)
    read(w, "a")
    until_whole(w, held(w, "a"))
    chain = w.chain("a", DOCUMENT)
    device, host = w.cache.residency.groups[0].slots, w.index.host
    device.evict(device.pool.find_all(chain.names), EvictionCause.ROOM)
    promotion = w.cache.promote(w.cache.lookup(chain, DOCUMENT + 1))
    assert w.lanes[Route.HOST_TO_DEVICE].num_pending > 0

    host[0].evict(host[0].pool.find_all(chain.names), EvictionCause.ROOM)
    if is_told_before_it_comes:
        w.cache.poll()  # the cache learns of the loss while the device cannot find the block yet
    w.settle()

    assert promotion.num_blocks == NUM_BLOCKS
    w.cache.release(promotion.tables)
    w.check()
    leave_the_device(w, "a")
    assert places(w, "a") == [Tier.HOST] * NUM_BLOCKS


def test_what_failed_to_leave_the_device_is_copied_down_when_the_bus_is_tried_again() -> None:
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 16, 40, None, world().rng)
    computed(w, "a")
    w.lanes[Route.DEVICE_TO_HOST].failing = 1.0
    w.cache.spill()
    w.settle()
    assert moved(w, Route.DEVICE_TO_HOST).num_failed > 0
    w.lanes[Route.DEVICE_TO_HOST].failing = 0.0
    w.clock.now += BACK_OFF_S

    w.cache.spill()
    w.settle()

    assert host_blocks(w, "a") > 0


def test_a_copy_down_that_failed_is_not_found_and_the_bus_is_left_alone_for_a_while() -> None:
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 16, 40, None, world().rng)
    computed(w, "a")
    w.lanes[Route.DEVICE_TO_HOST].failing = 1.0
    pin = held(w, "a")
    w.settle()
    num_failed = moved(w, Route.DEVICE_TO_HOST).num_failed

    w.cache.spill()
    w.settle()

    assert num_failed > 0
    assert moved(w, Route.DEVICE_TO_HOST).num_failed == num_failed
    assert host_blocks(w, "a") == 0
    w.lanes[Route.DEVICE_TO_HOST].failing = 0.0
    w.clock.now += BACK_OFF_S
    until_whole(w, pin)
    w.cache.pins.unpin(pin)


def computed(w: World, document: str) -> None:
    """Compute the document and leave, without copies in between."""
    tables = w.cache.allocate([NUM_BLOCKS])
    assert tables is not None
    w.compute(tables, w.chain(document, DOCUMENT), 0, DOCUMENT)
    w.cache.release(tables)


def moved(w: World, route: Route) -> RouteStatistics:
    return w.cache.statistics().routes[route]


def test_a_block_on_its_way_down_is_not_copied_a_second_time() -> None:
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 16, 40, None, world().rng)
    computed(w, "a")
    pin = held(w, "a")
    for _ in range(5):  # while its copies are under way
        w.clock.now += 0.1
        w.cache.poll()

    until_whole(w, pin)

    assert moved(w, Route.DEVICE_TO_HOST).num_bytes == NUM_BLOCKS * BLOCK_BYTES
    w.cache.pins.unpin(pin)


def test_an_upload_and_a_verification_that_found_the_lane_full_have_their_turn(by_layers: World) -> None:
    w = by_layers
    lane = w.lanes[Route.HOST_TO_DEVICE]
    lane.capacity = 1  # room for the copy, none for what verifies it
    promotion = promote(w, "a")
    assert promotion.gate is not None
    read_by_layers = [promotion]
    w.settle()
    assert promotion.done
    w.cache.release(promotion.tables)
    leave_the_device(w, "a")
    lane.capacity = 0
    read_by_layers.append(promote(w, "a"))
    lane.capacity = 1
    w.settle()

    assert all(promotion.done for promotion in read_by_layers)
    assert [balance(promotion) for promotion in read_by_layers] == [(0, DOCUMENT, 0, 1)] * 2
    w.cache.release(read_by_layers[1].tables)
    w.check()


def test_copies_by_layers_that_failed_publish_nothing_and_keep_nobody_at_the_gate(by_layers: World) -> None:
    w = by_layers
    w.lanes[Route.HOST_TO_DEVICE].failing = 1.0
    promotion = promote(w, "a")
    assert promotion.gate is not None

    w.settle()
    promotion.gate.wait(3, 4, give_up_at=0.0)

    assert not promotion.gate.missed, "computing would wait for what never comes"
    assert promotion.done
    assert (promotion.num_blocks, promotion.failure) == (0, Reason.FAILED)
    w.check()


def test_a_copy_by_layers_that_breaks_off_publishes_nothing(by_layers: World, monkeypatch: pytest.MonkeyPatch) -> None:
    w = by_layers

    def break_off(host_slots: object, device_slots: object, layers: range) -> None:
        raise OSError("the copy failed")

    monkeypatch.setattr(w.memories[0], "to_device_layers", break_off)
    promotion = promote(w, "a")
    w.settle()

    assert promotion.done
    assert promotion.num_blocks == 0
    w.check()


def test_what_is_partly_on_disk_does_not_come_by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BY_LAYERS_BYTES", 0)
    groups = [FullAttention(BLOCK_SIZE)]
    w = World(groups, [BLOCK_BYTES], 16, 40, MemoryStore(100 * CHARGE), world().rng, by_layers=True)
    on_disk_only(w, "a")
    half = w.cache.pins.pin(w.chain("a", DOCUMENT // 2), DOCUMENT // 2)
    assert half is not None
    until_whole(w, half)

    promotion = promote(w, "a")
    w.settle()

    assert promotion.gate is None
    assert balance(promotion) == (0, DOCUMENT // 2, DOCUMENT // 2, 1)
    w.cache.release(promotion.tables)
    w.cache.pins.unpin(half)
    w.check()


def test_queued_reads_fail_as_soon_as_the_disk_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "BATCH_BYTES", BLOCK_BYTES)
    w = world(num_device_slots=16, num_host_slots=40)
    on_disk_only(w, "a")
    w.lanes[Route.DISK_TO_HOST].capacity = 1
    w.lanes[Route.DISK_TO_HOST].failing = 1.0

    promotion = promote(w, "a")  # ten reads, of which three are made
    w.settle()

    assert promotion.done
    assert moved(w, Route.DISK_TO_HOST).num_failed == MAX_FAILURES
    w.check()


def test_what_may_come_later_keeps_one_reader_busy_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "BATCH_BYTES", BLOCK_BYTES)
    w = world(num_device_slots=16, num_host_slots=40)
    on_disk_only(w, "a")

    pin = held(w, "a")
    for _ in range(3):
        w.cache.poll()

    assert w.lanes[Route.DISK_TO_HOST].num_pending == 1
    until_whole(w, pin)
    w.cache.pins.unpin(pin)


def test_a_held_block_that_a_promotion_wants_now_is_read_before_what_is_only_held() -> None:
    w = world(num_device_slots=24, num_host_slots=60)
    on_disk_only(w, "a")
    on_disk_only(w, "b")
    w.lanes[Route.DISK_TO_HOST].capacity = 0
    pins = [held(w, "a"), held(w, "b")]
    promotion = promote(w, "b")
    w.lanes[Route.DISK_TO_HOST].capacity = 1

    w.cache.poll()
    w.lanes[Route.DISK_TO_HOST].stir(1.0)
    w.cache.poll()

    assert (host_blocks(w, "a"), host_blocks(w, "b")) == (0, NUM_BLOCKS)
    w.settle()
    w.cache.release(promotion.tables)
    for pin in pins:
        w.cache.pins.unpin(pin)


def full_of_what_cannot_be_written(num_host_slots: int) -> World:
    """Document "a" is on disk only, host memory is full of blocks that a failing disk does not take."""
    w = world(num_device_slots=16, num_host_slots=num_host_slots)
    on_disk_only(w, "a")
    w.lanes[Route.HOST_TO_DISK].failing = 1.0
    for number in range(2 * num_host_slots // NUM_BLOCKS + 2):
        read(w, f"not written {number}")
    assert breakers(w)["write"] == "open"
    w.cache.poll()
    return w


def test_a_read_takes_the_room_of_what_cannot_be_written_and_what_is_only_held_does_not() -> None:
    w = full_of_what_cannot_be_written(num_host_slots=20)
    dropped = w.cache.statistics().tiers[Tier.HOST].dropped_spills
    pin = held(w, "a")
    w.settle()
    dropped_for_hold = w.cache.statistics().tiers[Tier.HOST].dropped_spills
    promotion = promote(w, "a")
    w.settle()

    assert dropped_for_hold == dropped
    assert promotion.done
    assert balance(promotion)[2] == DOCUMENT
    w.cache.release(promotion.tables)
    w.cache.pins.unpin(pin)
    w.check()


def test_a_disk_that_is_only_busy_loses_no_block_of_host_memory() -> None:
    w = world(num_device_slots=16, num_host_slots=12)
    w.lanes[Route.HOST_TO_DISK].capacity = 0
    for number in range(6):
        computed(w, f"document {number}")
        w.cache.spill()
        w.settle()

    assert w.cache.statistics().tiers[Tier.HOST].dropped_spills == 0
    w.check()


def test_a_write_that_hangs_is_a_disk_to_be_left_alone() -> None:
    w = world(num_device_slots=16, num_host_slots=40)
    computed(w, "a")
    pin = held(w, "a")
    for _ in range(10):
        w.clock.now += 0.1
        w.lanes[Route.DEVICE_TO_HOST].stir(1.0)
        w.cache.poll()
    w.cache.spill()
    assert w.lanes[Route.HOST_TO_DISK].num_pending > 0

    w.clock.now += 60.0
    w.cache.spill()

    assert breakers(w)["write"] == "open"
    w.settle()
    w.cache.pins.unpin(pin)
    w.check()


def test_blocks_that_a_full_store_evicted_in_vain_are_not_looked_for_on_disk() -> None:
    class FullStore(MemoryStore):
        is_full = False

        def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
            if not self.is_full:
                return super().put_many(blobs)
            error = StoreFull("no room")
            error.evicted = list(self.keys())
            self.delete(error.evicted)
            raise error

    store = FullStore(100 * CHARGE)
    w = world(num_device_slots=16, num_host_slots=40, store=store)
    on_disk_only(w, "a")
    store.is_full = True

    read(w, "b")
    w.cache.spill()
    w.settle()

    assert not list(store.keys())
    assert places(w, "a") == [None] * NUM_BLOCKS
    w.check()


def test_what_running_requests_hold_is_copied_down_before_they_leave_when_slots_run_short() -> None:
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 16, 40, None, world().rng)
    tables = w.cache.allocate([16])
    assert tables is not None
    w.compute(tables, w.chain("a", 16 * BLOCK_SIZE), 0, 16 * BLOCK_SIZE)

    for _ in range(3):
        w.cache.spill()
        w.settle()

    assert host_blocks(w, "a") > 0
    w.cache.release(tables)
    w.check()


def test_blocks_of_two_groups_that_are_read_together_land_each_in_its_own() -> None:
    groups = [SlidingWindow(BLOCK_SIZE, 4 * DOCUMENT), FullAttention(BLOCK_SIZE)]
    w = World(groups, [BLOCK_BYTES, 2 * BLOCK_BYTES], 16, 40, MemoryStore(200 * CHARGE), world().rng)
    on_disk_only(w, "a")
    w.lanes[Route.DISK_TO_HOST].capacity = 1

    promotion = promote(w, "a")
    w.settle()

    assert balance(promotion) == (0, 0, DOCUMENT, 1)
    for group_id, table in enumerate(promotion.tables):
        for slot, name in zip(table, promotion.chain.names, strict=False):
            assert (w.device[group_id][slot] == w.bytes_of(group_id, name)).all()
    w.cache.release(promotion.tables)
    w.check()


@pytest.mark.parametrize("quota", [5, 10])
@pytest.mark.parametrize("how", ["promoted", "held"])
def test_what_comes_from_disk_keeps_its_tenant_within_the_quota(how: str, quota: int) -> None:
    store = MemoryStore(100 * CHARGE)
    before = world(store=store)
    for document in ("team\0a", "team\0b"):
        read(before, document)
    before.flush()
    tenant = tenant_of("team\0a")
    w = World(
        [FullAttention(BLOCK_SIZE)],
        [BLOCK_BYTES],
        32,
        40,
        store,
        world().rng,
        quotas={tenant: quota * BLOCK_BYTES},
    )

    for document in ("team\0a", "team\0b"):
        if how == "promoted":
            promotion = promote(w, document)
            w.settle()
            assert balance(promotion)[2] == DOCUMENT
            w.cache.release(promotion.tables)
        else:
            pin = held(w, document)
            until_whole(w, pin)
            held_bytes = w.cache.statistics().host_tenants[tenant]
            w.cache.pins.unpin(pin)
            assert held_bytes == NUM_BLOCKS * BLOCK_BYTES  # the older one had to go, what is held may not

    if how == "promoted":
        assert w.cache.statistics().host_tenants[tenant] <= quota * BLOCK_BYTES
    w.check()


def test_what_was_held_is_forgotten_from_its_tail() -> None:
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 16, 20, None, world().rng)
    computed(w, "a")
    pin = held(w, "a")
    until_whole(w, pin)
    w.cache.pins.unpin(pin)
    leave_the_device(w, "a")

    for number in range(20):
        left = [tier is Tier.HOST for tier in places(w, "a")]
        assert left == sorted(left, reverse=True), "a beginning has gone before what continues it"
        read(w, f"more {number}", 2 * BLOCK_SIZE + 1)

    assert not all(left), "nothing of it was forgotten: this shows nothing"


def test_a_device_block_whose_record_was_evicted_is_copied_down_again_before_it_goes() -> None:
    w = world(num_device_slots=40, num_host_slots=20, store=MemoryStore(20 * CHARGE))
    for document in "abc":  # a host and a disk of two documents each
        read(w, document)
        pin = held(w, document)
        until_whole(w, pin)
        w.cache.pins.unpin(pin)
        for _ in range(3):
            w.cache.spill()
            w.settle()
    assert places(w, "a") == [Tier.DEVICE] * NUM_BLOCKS

    leave_the_device(w, "a")

    assert None not in places(w, "a")
    assert w.cache.statistics().tiers[Tier.DEVICE].dropped_spills == 0


def test_a_slot_is_taken_from_a_block_with_a_copy_below_before_an_older_one_without() -> None:
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 24, 40, None, world().rng)
    tables = w.cache.allocate([2])
    assert tables is not None
    w.compute(tables, w.chain("older", 2 * BLOCK_SIZE), 0, 2 * BLOCK_SIZE)
    w.cache.release(tables)
    computed(w, "a")
    pin = held(w, "a")
    until_whole(w, pin)
    w.cache.pins.unpin(pin)
    w.lanes[Route.DEVICE_TO_HOST].capacity = 0

    assert w.cache.allocate([24 - 2 - NUM_BLOCKS + 3]) is not None

    assert w.cache.lookups.where(w.chain("older", 2 * BLOCK_SIZE)) == [Tier.DEVICE] * 2
    assert w.cache.statistics().tiers[Tier.DEVICE].dropped_spills == 0


def test_a_block_that_came_up_can_be_shared_in_part() -> None:
    w = world(num_device_slots=16, num_host_slots=40)
    read(w, "a")
    leave_the_device(w, "a")
    promotion = promote(w, "a")
    w.settle()
    w.cache.release(promotion.tables)

    hit = w.cache.lookup(w.chain("a", DOCUMENT - 1), DOCUMENT - 1)

    assert hit.num_tokens == DOCUMENT - BLOCK_SIZE
    assert hit.partial is not None
    assert hit.partial.num_tokens == BLOCK_SIZE - 2  # the last token is always computed


def test_the_loss_of_thousands_of_copies_is_taken_in_by_many_polls() -> None:
    num_blocks = 4 * LOST_AT_ONCE
    w = world(num_device_slots=num_blocks, num_host_slots=8)
    index, slots = w.index.disk.index, w.cache.residency.groups[0].slots
    chain = w.chain("a", num_blocks // 2 * BLOCK_SIZE)
    tables = w.cache.allocate([num_blocks // 2])
    assert tables is not None
    w.cache.commit(tables, chain, 0, num_blocks // 2 * BLOCK_SIZE)
    w.cache.release(tables)
    others = [BlockName(number.to_bytes(32, "big")) for number in range(num_blocks // 2)]
    index.add(0, [*chain.names, *others])
    slots.dirty.remove(np.array(tables[0], np.intp))
    names = [name for pair in zip(chain.names, others, strict=True) for name in pair]

    w.lower.on_gone_from_disk([w.index.disk.key(0, name) for name in names], EvictionCause.ROOM)

    num_dirty = [0]
    for _ in range(10):
        w.cache.poll()
        num_dirty.append(len(slots.dirty))
    assert num_dirty[-1] == len(chain.names)
    assert 0 < max(after - before for before, after in pairwise(num_dirty)) <= LOST_AT_ONCE // 2 + 1
    assert all(ghost is not None and ghost.tier is Tier.DISK for ghost in w.cache.residency.ghosts.find_all(others))
    assert w.cache.residency.ghosts.find_all(chain.names) == [None] * len(chain.names)


def test_a_few_lost_copies_after_another_are_taken_in_by_one_poll() -> None:
    w = world(num_device_slots=8, num_host_slots=8)
    names = [BlockName(number.to_bytes(32, "big")) for number in range(20)]
    w.index.disk.index.add(0, names)

    for name in names:
        w.index.remove_from_disk_index(0, name, EvictionCause.CORRUPT)
    w.cache.poll()

    assert None not in w.cache.residency.ghosts.find_all(names)
