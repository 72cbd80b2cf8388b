"""`CacheOptions.copies_all_down`: who shares the tiers below finds what was computed soon, not only near eviction."""

import random

import pytest
from chaos import World
from small_cache import BLOCK_BYTES, BLOCK_SIZE, CHARGE, DOCUMENT, read, world

from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.down import host_spill
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.tier import EvictionCause, Tier
from kvtier.tiers.up.promotion import Tables
from kvtier.transfer.transfer_engine import Route

NUM_BLOCKS = DOCUMENT // BLOCK_SIZE


def compute(w: World, document: str) -> Tables:
    """Compute a document whose blocks stay leased."""
    tables = w.cache.allocate([NUM_BLOCKS])
    assert tables is not None
    w.compute(tables, w.chain(document, DOCUMENT), 0, DOCUMENT)
    return tables


def num_leaving(w: World) -> int:
    """Blocks on their way from the device to host memory."""
    return sum(transfer.num_bytes for transfer in w.lanes[Route.DEVICE_TO_HOST].held) // BLOCK_BYTES


def num_below(w: World, document: str) -> int:
    """Blocks of the document, from its front, that others would find below."""
    return len(w.lower.find_run(0, w.names(document, DOCUMENT)))


def test_what_a_running_request_has_computed_is_below_before_it_ends() -> None:
    w = world(num_device_slots=64, copies_all_down=True)
    tables = compute(w, "a")

    w.cache.spill()
    w.settle()

    assert num_below(w, "a") == NUM_BLOCKS
    w.cache.release(tables)
    w.check()


def test_without_others_what_a_running_request_has_computed_is_not_copied() -> None:
    w = world(num_device_slots=64)
    compute(w, "a")

    w.cache.spill()

    assert num_leaving(w) == 0


def test_the_oldest_blocks_go_first_and_so_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_spill, "MAX_STARTED", 6)
    w = world(num_device_slots=64, copies_all_down=True)
    compute(w, "a")
    compute(w, "b")

    seen = []
    for _ in range(4):
        w.cache.spill()
        w.settle()
        seen.append((num_below(w, "a"), num_below(w, "b")))

    assert seen == [(6, 0), (10, 2), (10, 8), (10, 10)]


def test_a_block_is_copied_once() -> None:
    w = world(num_device_slots=64, copies_all_down=True)
    w.cache.release(compute(w, "a"))
    w.cache.spill()
    w.settle()

    w.cache.spill()
    read(w, "a")
    w.cache.spill()

    assert num_leaving(w) == 0
    assert w.cache.statistics().routes[Route.DEVICE_TO_HOST].num_bytes == NUM_BLOCKS * BLOCK_BYTES


def test_while_a_promotion_is_under_way_only_what_is_due_is_copied() -> None:
    w = world(num_device_slots=64, copies_all_down=True)
    read(w, "a")
    w.flush()
    group = w.cache.residency.groups[0]
    group.slots.evict(group.pool.cached_slots(), EvictionCause.ROOM)
    tables = compute(w, "b")

    promotion = w.cache.promote(w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1))
    assert not promotion.done
    w.cache.spill()
    meanwhile = num_leaving(w)
    w.settle()
    w.cache.spill()

    assert meanwhile == 0
    assert num_leaving(w) == NUM_BLOCKS
    w.settle()
    w.cache.release(promotion.tables)
    w.cache.release(tables)
    w.check()


def test_while_a_promotion_waits_for_the_disk_only_what_is_due_is_copied() -> None:
    w = world(num_device_slots=64, copies_all_down=True)
    read(w, "a")
    w.flush()
    w.evict_blocks(w.names("a", DOCUMENT))  # in host memory too
    tables = compute(w, "b")

    promotion = w.cache.promote(w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1))
    assert w.lanes[Route.DISK_TO_HOST].num_pending
    assert not w.lanes[Route.HOST_TO_DEVICE].num_pending
    w.cache.spill()

    assert num_leaving(w) == 0
    w.settle()
    w.cache.release(promotion.tables)
    w.cache.release(tables)


def test_a_host_that_is_full_of_others_takes_what_it_has_room_for() -> None:
    w = world(num_device_slots=64, num_host_slots=6, copies_all_down=True)
    w.cache.release(compute(w, "a"))

    for _ in range(8):
        w.cache.spill()
        w.settle()

    assert num_below(w, "a") == NUM_BLOCKS
    assert w.cache.statistics().tiers[Tier.DEVICE].dropped_spills == 0
    w.check()


@pytest.mark.parametrize("num_disk_blocks", [None, 8])
def test_tiers_below_that_are_smaller_than_the_device_come_to_rest(num_disk_blocks: int | None) -> None:
    store = None if num_disk_blocks is None else MemoryStore(num_disk_blocks * CHARGE)
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 24, 4, store, random.Random(1), copies_all_down=True)

    def copied() -> tuple[int, int]:
        routes = w.cache.statistics().routes
        return routes[Route.DEVICE_TO_HOST].num_bytes, routes[Route.HOST_TO_DISK].num_bytes

    def rest() -> tuple[int, int]:
        for _ in range(20):
            w.cache.spill()
            w.settle()
        return copied()

    read(w, "a")
    at_rest = rest()
    assert rest() == at_rest
    assert at_rest[0] == NUM_BLOCKS * BLOCK_BYTES, "each block goes down once"
    assert w.cache.drain.spill_rest() == 0

    read(w, "b")
    assert rest()[0] >= 2 * at_rest[0], "what is computed later goes down too"
    assert rest() == rest()
    w.check()


def test_a_copy_that_was_damaged_below_is_made_again() -> None:
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 64, 40, None, random.Random(1), copies_all_down=True)
    read(w, "a")
    w.cache.spill()
    w.settle()
    w.lower.forget(0, w.names("a", DOCUMENT)[3:4])
    assert num_below(w, "a") == 3
    w.cache.poll()
    w.cache.spill()
    w.settle()

    assert num_below(w, "a") == NUM_BLOCKS
