"""A disk whose store opens late, goes away, or is opened anew with other content."""

import random
from collections.abc import Sequence

import pytest
from chaos import World
from late_store import LateStore, empty
from small_cache import BLOCK_BYTES, DOCUMENT, balance, read

from kvtier.store.blob_store import Blob, StoreUnavailable
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.tier import EvictionCause, Tier
from kvtier.transfer.transfer_engine import Route

BLOCK_SIZE = 4


def world(store: LateStore, num_host_slots: int = 24, **options: object) -> World:
    groups = [FullAttention(BLOCK_SIZE)]
    return World(
        groups,
        [BLOCK_BYTES],
        16,
        num_host_slots,
        store,  # type: ignore[arg-type]  # it has what a tier asks for
        random.Random(1),
        opening=store.opening,
        **options,  # type: ignore[arg-type]
    )


def disk_of(w: World) -> DiskTier:
    disk = w.index.disk
    assert disk is not None
    return disk


def step(w: World, num_times: int = 10) -> None:
    """As an engine does that has nothing else to do."""
    for _ in range(num_times):
        w.cache.poll()
        w.cache.spill()
        w.settle()
    w.check()


def test_without_its_store_the_tiers_above_serve_and_nobody_waits_for_the_disk() -> None:
    w = world(LateStore())

    for document in "abcdefgh":
        read(w, document)  # three times what host and device have together

    disk = disk_of(w)
    assert balance(read(w, "h"))[0] == DOCUMENT
    assert (disk.is_open, disk.is_failing, w.cache.lower.status.is_indexed) == (False, True, False)
    assert (disk.writing.num_opened, disk.reading.num_opened) == (0, 0)
    assert w.cache.drain.flush(10) > 0
    w.check()


def test_a_store_that_opens_late_gives_what_it_has_and_takes_what_comes_from_then_on() -> None:
    kept = empty()
    before = world(LateStore(kept))
    read(before, "z")
    before.flush()
    late = LateStore()
    w = world(late)
    read(w, "a")

    late.change(kept)
    step(w)

    assert w.cache.lower.status.is_indexed
    assert disk_of(w).is_open
    assert balance(read(w, "z")) == (0, 0, DOCUMENT, 1)
    w.flush()
    for other in "bcdefgh":
        read(w, other)
    assert balance(read(w, "a")) == (0, 0, DOCUMENT, 1)  # it was there before the store


def test_what_was_in_a_store_that_is_gone_is_not_looked_for_in_the_next_one() -> None:
    late = LateStore(empty())
    w = world(late)
    for document in "abcdef":
        read(w, document)
    w.flush()

    late.change(empty())
    step(w, 1)

    assert w.cache.statistics().tiers[Tier.DISK].num_blocks <= 40  # what is above, at most
    assert w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1).num_tokens == 0
    assert balance(read(w, "a")) == (0, 0, 0, DOCUMENT + 1)
    assert disk_of(w).reading.state is BreakerState.CLOSED


def test_what_is_above_is_written_again_to_a_store_that_was_opened_anew() -> None:
    late = LateStore(empty())
    w = world(late)
    for document in "abc":
        read(w, document)
    w.flush()
    again = empty()

    late.change(again)
    step(w)
    w.flush()

    group = w.cache.residency.groups[0]
    names = [name for document in "abc" for name in w.names(document, DOCUMENT)]
    above = {name for name in names if w.cache.residency.tier_of(group, name)}
    on_disk = {disk_of(w).block_of(key) for key in again.keys()}  # noqa: SIM118  # no dict
    assert len(above) >= 24  # as many as the host has slots
    assert {(0, name) for name in above} <= on_disk


def test_device_blocks_whose_only_copies_were_in_a_store_that_is_gone_are_copied_down_again() -> None:
    late = LateStore(empty())
    w = world(late)
    read(w, "a")
    w.flush()
    host, device, names = w.index.host[0], w.cache.residency.groups[0].slots, w.names("a", DOCUMENT)
    host.evict(host.pool.find_all(names), EvictionCause.ROOM)
    assert w.cache.lookups.where(w.chain("a", DOCUMENT)) == [Tier.DEVICE] * len(names)
    again = empty()

    late.change(again)
    step(w)
    w.flush()

    device.evict(device.pool.find_all(names), EvictionCause.ROOM)
    assert {disk_of(w).block_of(key) for key in again.keys()} == {(0, name) for name in names}  # noqa: SIM118  # no dict
    assert balance(read(w, "a"))[3] == 1


def test_a_page_of_a_store_that_is_gone_tells_nothing_of_the_next_one() -> None:
    full = empty()
    before = world(LateStore(full))
    read(before, "z")
    before.flush()
    late = LateStore()
    w = world(late)
    late.change(full)
    w.cache.poll()
    w.lanes[Route.DISK_TO_HOST].stir(1.0)  # the page is read, and not taken in yet

    late.change(empty())
    step(w)

    assert w.cache.lower.status.is_indexed
    assert disk_of(w).index.num_blocks == 0


def test_a_batch_that_was_written_while_the_store_was_replaced_does_not_count() -> None:
    late = LateStore(empty())
    w = world(late)
    disk = disk_of(w)
    put_many = late.put_many

    def replace_and_put(blobs: Sequence[Blob]) -> list[bytes]:
        evicted = put_many(blobs)
        late.change(empty())
        return evicted

    late.put_many = replace_and_put  # type: ignore[method-assign]

    with pytest.raises(StoreUnavailable, match="reopened during a write"):
        disk.write([])


def test_a_store_that_met_damage_and_began_again_is_looked_through_again() -> None:
    late = LateStore(empty())
    w = world(late)
    for document in "abcdef":
        read(w, document)
    w.flush()
    late.begin_again()

    for document in "ghi":
        read(w, document)
    step(w)

    assert w.cache.lookup(w.chain("b", DOCUMENT), DOCUMENT + 1).num_tokens == 0
    on_disk = {disk_of(w).block_of(key) for key in late.keys()}  # noqa: SIM118  # no dict
    assert len(on_disk) == disk_of(w).index.num_blocks
    assert all(disk_of(w).index.holds(*block) for block in on_disk if block is not None)


def test_what_was_written_lately_counts_from_when_the_store_is_open() -> None:
    kept = empty()
    before = world(LateStore(kept))
    for document in "abc":
        read(before, document)
    before.flush()
    late = LateStore()
    w = world(late, written_bytes_per_day=20 * BLOCK_BYTES)
    assert disk_of(w).budget.left_bytes == 20 * BLOCK_BYTES

    late.change(kept)
    step(w, 1)

    left = disk_of(w).budget.left_bytes
    assert left is not None
    assert left <= 0


def test_no_wrong_byte_and_no_lost_book_whenever_the_store_comes_and_goes() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    late, stores = LateStore(), [empty() for _ in range(3)]
    w = world(late)

    for _ in range(150):
        dice = rng.random()
        if dice < 0.15:
            late.change(rng.choice([None, *stores]))
        elif dice < 0.2:
            w.clock.now += rng.choice([0.5, 5.0, 100.0])
        else:
            read(w, rng.choice("abcdefgh"), rng.randrange(1, DOCUMENT + 2))
        if rng.random() < 0.3:
            step(w, 1)

    late.change(stores[0])
    w.clock.now += 100.0
    step(w, 20)
    on_disk = {disk_of(w).block_of(key) for key in late.keys()}  # noqa: SIM118  # no dict
    assert len(on_disk) == disk_of(w).index.num_blocks
    assert all(disk_of(w).index.holds(*block) for block in on_disk if block is not None)
