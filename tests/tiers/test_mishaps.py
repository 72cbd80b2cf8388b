"""What one mishap may cost: a lane that is full, a copy below that is gone, a block that is forgotten on its way."""

from itertools import count

import pytest
from chaos import World
from test_cache import BLOCK_BYTES, BLOCK_SIZE, CHARGE, DOCUMENT, balance, read, world
from test_holds import held, host_blocks, on_disk_only, until_whole

from kvtier.store.memory_store import MemoryStore
from kvtier.tiers import arrivals
from kvtier.tiers.breaker import MAX_FAILURES, REST_S
from kvtier.tiers.groups import FullAttention
from kvtier.tiers.promotion import Promotion
from kvtier.tiers.tier import Reason, Tier
from kvtier.transfer.transfer_engine import Route

NUM_BLOCKS = DOCUMENT // BLOCK_SIZE


def breakers(w: World) -> dict[str, str]:
    disk = w.cache.statistics().disk
    assert disk is not None
    return dict(disk.breakers)


def promote(w: World, document: str, timeout_s: float | None = None) -> Promotion:
    chain = w.chain(document, DOCUMENT)
    return w.cache.promote(w.cache.lookup(chain, DOCUMENT + 1), timeout_s)


def places(w: World, document: str) -> list[Tier | None]:
    return w.cache.where(w.chain(document, DOCUMENT))


def leave_the_device(w: World, document: str) -> None:
    """Answer other prompts, every copy having its time, until the device has nothing of the document."""
    for number in count():
        if Tier.DEVICE not in places(w, document):
            return
        assert number < 20, "the document never leaves the device"
        read(w, f"passing {number}")


def test_a_read_that_found_its_lane_full_leaves_the_probe_to_the_next() -> None:
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
    promotion = promote(w, "a")
    w.cache.poll()
    w.lanes[Route.DISK_TO_HOST].capacity = 6
    w.settle()

    assert promotion.done
    assert balance(promotion) == (0, 0, DOCUMENT, 1)
    assert breakers(w)["read"] == "closed"
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
    monkeypatch.setattr(arrivals, "BY_LAYERS_BYTES", 0)
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
    slot = w.cache._residency.host.pools[0].find(chain.names[3])
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

    promotion.gate.wait(0, 4, give_up_at=0.0)  # the time is over: who computes goes on with what is in the slots
    w.settle()

    assert promotion.done
    assert (promotion.num_blocks, promotion.failure) == (0, Reason.FAILED)
    assert w.cache.free_slots() == [16]
    w.check()
    assert balance(read(w, "a")) == (0, DOCUMENT, 0, 1)


def test_a_device_block_whose_host_copy_was_evicted_is_copied_down_again_before_it_goes() -> None:
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 40, 20, None, world().rng)
    for document in "abc":  # a host of two documents, into each of which one is brought
        read(w, document)
        hold = held(w, document)
        until_whole(w, hold)
        w.cache.end_hold(hold)
    assert host_blocks(w, "a") == 0
    assert places(w, "a") == [Tier.DEVICE] * NUM_BLOCKS

    leave_the_device(w, "a")

    assert places(w, "a") == [Tier.HOST] * NUM_BLOCKS
    assert w.cache.statistics().tiers[Tier.DEVICE].dropped_spills == 0


@pytest.mark.parametrize("fault", ["missing", "corrupt"])
def test_a_device_block_whose_record_was_found_bad_is_copied_down_again_before_it_goes(fault: str) -> None:
    store = MemoryStore(100 * CHARGE)
    w = world(num_device_slots=40, num_host_slots=20, store=store)
    read(w, "a")
    w.flush()
    for document in "bc":  # host memory forgets the document, the device does not
        read(w, document)
        hold = held(w, document)
        until_whole(w, hold)
        w.cache.end_hold(hold)
    w.flush()
    assert host_blocks(w, "a") == 0
    assert places(w, "a") == [Tier.DEVICE] * NUM_BLOCKS
    if fault == "missing":
        store.delete(list(store.keys()))
    else:
        rot(store)

    hold = held(w, "a")
    w.settle()  # the records are read, and found bad
    w.cache.end_hold(hold)
    w.check()
    leave_the_device(w, "a")

    assert all(tier is not None for tier in places(w, "a"))
    assert w.cache.statistics().tiers[Tier.DEVICE].dropped_spills == 0
    assert balance(read(w, "a"))[3] == 1


def rot(store: MemoryStore) -> None:
    """Damage every record."""
    for key, row in store._rows.items():
        payload = bytearray(row.payload)
        payload[0] ^= 1
        store._rows[key] = type(row)(row.header, bytes(payload), row.charged_bytes, row.parent, row.tenant)


def test_a_held_block_whose_read_failed_is_not_whole_and_is_read_again() -> None:
    w = world(num_device_slots=16, num_host_slots=40)
    on_disk_only(w, "a")
    w.lanes[Route.DISK_TO_HOST].failing = 1.0
    hold = held(w, "a")
    w.cache.poll()
    w.settle()
    assert not hold.is_whole
    assert host_blocks(w, "a") == 0

    w.lanes[Route.DISK_TO_HOST].failing = 0.0
    until_whole(w, hold)

    assert host_blocks(w, "a") == NUM_BLOCKS
    w.cache.end_hold(hold)
    w.check()


def test_a_block_that_was_forgotten_on_its_way_to_host_memory_is_not_found_there() -> None:
    w = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 16, 40, None, world().rng)
    chain = w.chain("a", DOCUMENT)
    tables = w.cache.allocate([NUM_BLOCKS])
    assert tables is not None
    w.compute(tables, chain, 0, DOCUMENT)
    w.cache.release(tables)
    hold = held(w, "a")  # starts its copies to host memory
    w.cache.end_hold(hold)
    assert w.lanes[Route.DEVICE_TO_HOST].num_pending > 0

    w.cache.evict_blocks(chain.names)
    w.settle()

    assert places(w, "a") == [None] * NUM_BLOCKS
    w.check()


def test_a_block_that_was_forgotten_on_its_way_to_disk_leaves_no_mark_on_who_comes_after_it() -> None:
    w = world(num_device_slots=16, num_host_slots=40)
    read(w, "a")
    hold = held(w, "a")
    for _ in range(10):
        w.clock.now += 0.1
        w.cache.poll()
        w.lanes[Route.DEVICE_TO_HOST].stir(1.0)
    w.cache.poll()
    w.cache.spill()
    assert w.lanes[Route.HOST_TO_DISK].num_pending > 0
    w.cache.end_hold(hold)

    w.cache.evict_blocks(w.chain("a", DOCUMENT).names)
    w.settle()

    assert host_blocks(w, "a") == 0
    assert w.cache.free_slots() == [16]
    w.check()
