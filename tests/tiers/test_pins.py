"""Prefixes that are kept in host memory, wherever they are now."""

import pytest
from pinned_blocks import held, host_blocks, on_disk_only, until_whole
from small_cache import BLOCK_SIZE, DOCUMENT, balance, read, world
from unreliable_tiers import UnreliableTiers

from kvtier.transfer.transfer_engine import Route


def test_what_is_held_comes_from_disk_takes_no_device_slot_and_outlives_what_flushes_host_memory() -> None:
    w = world(num_device_slots=16, num_host_slots=24)
    on_disk_only(w, "a")
    free = w.cache.free_slots()

    pin = held(w, "a")
    until_whole(w, pin)
    assert w.cache.free_slots() == free
    for document in "bcdefgh":
        read(w, document)

    assert host_blocks(w, "a") == DOCUMENT // BLOCK_SIZE
    assert balance(read(w, "a"))[1] == DOCUMENT  # from host memory
    w.cache.pins.unpin(pin)
    w.check()
    for document in "ijklmno":
        read(w, document)
    assert host_blocks(w, "a") == 0


@pytest.mark.parametrize("is_leased", [True, False])
def test_what_only_the_device_has_is_copied_down_also_while_a_request_leases_it(is_leased: bool) -> None:
    w = world(num_device_slots=16, num_host_slots=40)
    chain = w.chain("a", DOCUMENT)
    promotion = w.cache.promote(w.cache.lookup(chain, DOCUMENT + 1))
    slots = w.cache.allocate([DOCUMENT // BLOCK_SIZE])
    assert slots is not None
    promotion.tables[0].extend(slots[0])
    w.compute(promotion.tables, chain, 0, DOCUMENT)
    if not is_leased:
        w.cache.release(promotion.tables)
    assert host_blocks(w, "a") == 0

    pin = held(w, "a")
    until_whole(w, pin)

    assert host_blocks(w, "a") == DOCUMENT // BLOCK_SIZE
    w.cache.pins.unpin(pin)
    if is_leased:
        w.cache.release(promotion.tables)
    w.check()


def test_half_of_host_memory_may_be_held() -> None:
    w = world(num_device_slots=16, num_host_slots=20)
    read(w, "a")
    pin = held(w, "a")

    assert w.cache.pins.pin(w.chain("b", BLOCK_SIZE), BLOCK_SIZE) is None

    w.cache.pins.unpin(pin)
    w.cache.pins.unpin(pin)
    assert w.cache.pins.pin(w.chain("b", BLOCK_SIZE), BLOCK_SIZE) is not None


def test_what_is_let_go_before_it_is_read_is_not_read() -> None:
    w = world(num_device_slots=16, num_host_slots=24)
    on_disk_only(w, "a")
    w.lanes[Route.DISK_TO_HOST].capacity = 0

    pin = held(w, "a")
    w.cache.poll()
    w.cache.pins.unpin(pin)
    w.lanes[Route.DISK_TO_HOST].capacity = 6
    w.settle()

    assert host_blocks(w, "a") == 0
    w.check()


def test_a_promotion_s_blocks_are_read_before_those_that_are_only_held() -> None:
    w = world(num_device_slots=24, num_host_slots=24)
    on_disk_only(w, "a")
    on_disk_only(w, "b")
    w.lanes[Route.DISK_TO_HOST].capacity = 0
    pin = held(w, "a")
    chain = w.chain("b", DOCUMENT)
    promotion = w.cache.promote(w.cache.lookup(chain, DOCUMENT + 1))
    w.lanes[Route.DISK_TO_HOST].capacity = 1

    w.cache.poll()
    w.lanes[Route.DISK_TO_HOST].stir(1.0)
    w.cache.poll()

    assert host_blocks(w, "b") > 0
    assert host_blocks(w, "a") == 0
    w.settle()
    w.cache.pins.unpin(pin)
    w.cache.release(promotion.tables)
    w.check()


def test_a_promotion_of_what_is_being_held_reads_nothing_twice() -> None:
    w = world(num_device_slots=16, num_host_slots=40)
    on_disk_only(w, "a")
    pin = held(w, "a")

    promotion = w.cache.promote(w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1))
    w.settle()

    assert balance(promotion)[2] == DOCUMENT
    until_whole(w, pin)
    w.cache.release(promotion.tables)
    w.cache.pins.unpin(pin)
    w.check()


def test_a_reset_ends_holds() -> None:
    w = world()
    read(w, "a")
    until_whole(w, pin := held(w, "a"))

    assert w.cache.reset()

    assert not pin.is_whole
    w.check()
    w.settle()
    assert not pin.leases[0].is_here.any()
    w.check()


def test_what_is_held_is_let_go_with_memory_that_is_lost_and_comes_again_from_disk() -> None:
    w = world(num_device_slots=16, num_host_slots=40, is_unreliable=True)
    on_disk_only(w, "a")
    pin = held(w, "a")
    until_whole(w, pin)
    assert isinstance(w.lower, UnreliableTiers)

    w.lower.die()  # its memory stays as long as anything of it is leased
    w.cache.poll()
    assert not pin.is_whole
    until_whole(w, pin)

    assert w.lower.is_alive
    assert host_blocks(w, "a") == DOCUMENT // BLOCK_SIZE
    w.cache.pins.unpin(pin)
    w.settle()
    w.check()
    assert not any(slots.pool.num_leases for slots in w.host or ())


def test_what_is_held_stays_leased_when_only_the_disk_begins_anew() -> None:
    w = world(num_device_slots=16, num_host_slots=40)
    read(w, "a")
    pin = held(w, "a")
    until_whole(w, pin)

    list(w.index.offer_all_to_disk(100))  # a new epoch
    w.cache.poll()
    num_leased = [slots.pool.num_leases for slots in w.host or ()]

    assert pin.is_whole
    assert num_leased == [DOCUMENT // BLOCK_SIZE]
    w.settle()
    w.cache.pins.unpin(pin)
    w.check()
