"""Tenants: each tenant's blocks are counted, and a quota costs its own tenant blocks and no other."""

import random
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

import numpy as np
import pytest
from chaos import World
from small_cache import BLOCK_BYTES, CHARGE, DOCUMENT, read

from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import DIGEST_BYTES
from kvtier.tiers.device.eviction_order import EvictionOrder
from kvtier.tiers.device.group_slots import GroupSlots
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.lower import host_quotas
from kvtier.tiers.lower.host_quotas import MAX_SHED, QUOTA_PART, HostBlocks, HostQuotas
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.named_blocks import NO_TENANT, number_of, tenant_of, tenant_with
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier

BLOCK_SIZE = 4
NUM_BLOCKS = DOCUMENT // BLOCK_SIZE
ANN, BOB = tenant_of("ann"), tenant_of("bob")


def world(host: Mapping[bytes, int], disk: Mapping[bytes, int], num_device_slots: int = 16) -> World:
    """A world in which the documents' salts, and so their names, are the tenants."""
    store = MemoryStore(1000 * CHARGE, quotas=disk)
    groups = [FullAttention(BLOCK_SIZE)]
    return World(groups, [BLOCK_BYTES], num_device_slots, 60, store, random.Random(1), quotas=host)


def push_out(w: World) -> None:
    """Fill the device with other documents."""
    for number in range(3):
        read(w, f"other {number}")


def test_a_tenant_is_known_by_its_salt_and_shows_nothing_of_it() -> None:
    assert tenant_of(None) == tenant_of("") == NO_TENANT
    assert len({tenant_of(salt) for salt in ("a", "b", "ab")}) == 3
    assert tenant_of("a\0document") == tenant_of("a\0other") == tenant_of("a")
    assert all(len(tenant_of(salt)) == 8 and salt.encode() not in tenant_of(salt) for salt in ("secret", "x"))


def test_blocks_count_for_their_tenant_in_every_tier() -> None:
    w = world({ANN: 1 << 30, BOB: 1 << 30}, {ANN: 1000 * CHARGE, BOB: 1000 * CHARGE})
    read(w, "ann")
    read(w, "bob", 21)
    push_out(w)
    w.flush()

    assert w.index.quotas.num_bytes[ANN] == NUM_BLOCKS * BLOCK_BYTES
    assert w.index.quotas.num_bytes[BOB] == 5 * BLOCK_BYTES
    tenants = w.store.statistics().tenants
    assert tenants[ANN] == NUM_BLOCKS * CHARGE
    assert tenants[BOB] == 5 * CHARGE
    w.check()


def test_over_its_quota_of_host_memory_a_tenant_loses_its_own_tails() -> None:
    w = world({ANN: 4 * BLOCK_BYTES, BOB: 1 << 30}, {})
    read(w, "bob")
    read(w, "ann")
    push_out(w)

    held = w.index.quotas.num_bytes
    assert held[ANN] == 4 * BLOCK_BYTES
    assert held[BOB] == NUM_BLOCKS * BLOCK_BYTES
    host = w.index.host
    names = w.names("ann", DOCUMENT)
    assert [host[0].pool.find(name) is not None for name in names] == [True] * 4 + [False] * 6
    assert w.cache.statistics().tiers[Tier.HOST].evicted == {EvictionCause.QUOTA: NUM_BLOCKS - 4}
    w.check()


def test_a_salt_that_came_and_went_leaves_nothing_behind() -> None:
    w = world({ANN: 1 << 30}, {})
    for number in range(20):
        read(w, f"salt {number}")

    assert w.cache.statistics().host_tenants.keys() == {ANN}
    w.check()


def test_a_tenants_own_blocks_are_looked_for_in_parts_of_the_hosts_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_quotas, "QUOTA_PART", 5)
    monkeypatch.setattr(host_quotas, "MAX_SHED", 2)
    looked_at: list[int] = []
    part = EvictionOrder.part
    monkeypatch.setattr(EvictionOrder, "part", lambda *a: [looked_at.append(a[2]), part(*a)][1])
    w = world({ANN: 4 * BLOCK_BYTES, BOB: 1 << 30}, {})
    for number in range(3):
        read(w, f"other {number}")  # stand before hers
    read(w, "ann")
    push_out(w)
    for _ in range(30):
        w.cache.poll()

    assert set(looked_at) == {5}
    assert w.cache.statistics().host_tenants[ANN] == 4 * BLOCK_BYTES
    host = w.index.host
    assert [host[0].pool.find(name) is not None for name in w.names("ann", DOCUMENT)] == [True] * 4 + [False] * 6
    w.check()


def test_a_part_full_of_a_tenants_blocks_takes_no_python_call_for_each_of_them() -> None:
    evicted: list[int] = []
    are_dirty: list[bool] = []

    def on_forgotten(
        slots: Ids, names: Sequence[BlockName], were_dirty: set[BlockName | None], cause: EvictionCause
    ) -> None:
        evicted.extend(slots.tolist())
        are_dirty.extend(name in were_dirty for name in names)

    host = GroupSlots(QUOTA_PART, True, on_forgotten)
    blocks = HostBlocks(QUOTA_PART)
    quotas = HostQuotas({ANN: 0}, [host], [blocks], [1])
    slots = host.take(QUOTA_PART, 0)
    assert slots is not None
    ids = np.array(slots, np.intp)
    host.pool.commit(slots, [BlockName(number.to_bytes(32, "big")) for number in range(QUOTA_PART)])
    owners = np.full(QUOTA_PART, number_of(ANN), np.uint64)
    blocks.record(ids, bytes(QUOTA_PART * DIGEST_BYTES), owners)
    quotas.add(0, owners)
    host.pool.release(slots)
    host.dirty.add(ids[: QUOTA_PART - MAX_SHED // 2])  # the last ones of the order are clean
    num_calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        quotas.enforce(0, ANN)
    finally:
        sys.setprofile(None)

    assert len(evicted) == MAX_SHED
    assert sum(are_dirty) == MAX_SHED - MAX_SHED // 2
    assert set(ids[-(MAX_SHED // 2) :].tolist()) <= set(evicted)
    assert num_calls < QUOTA_PART // 4


def test_over_its_quota_on_disk_too() -> None:
    w = world({}, {ANN: 4 * CHARGE, BOB: 1000 * CHARGE})
    read(w, "bob")
    read(w, "ann")
    push_out(w)
    w.flush()

    assert w.store.statistics().tenants[ANN] == 4 * CHARGE
    assert w.store.statistics().tenants[BOB] == NUM_BLOCKS * CHARGE
    keys = [w.index.disk.key(0, name) for name in w.names("ann", DOCUMENT)]
    assert [w.store.contains(key) for key in keys] == [True] * 4 + [False] * 6
    assert w.cache.statistics().tiers[Tier.DISK].evicted == {EvictionCause.QUOTA: NUM_BLOCKS - 4}
    w.check()


def test_a_quota_of_nothing_keeps_a_tenant_on_the_device() -> None:
    w = world({ANN: 0}, {ANN: 0}, num_device_slots=30)
    read(w, "ann")
    again = read(w, "ann")
    assert again.depths[: again.num_blocks].count(Tier.DEVICE.depth) == again.num_blocks == NUM_BLOCKS
    push_out(w)
    assert w.index.quotas.num_bytes.get(ANN, 0) == 0
    assert ANN not in w.store.statistics().tenants
    assert read(w, "ann").num_blocks < NUM_BLOCKS


def test_what_came_back_from_disk_counts_again() -> None:
    w = world({ANN: 1 << 30}, {})
    read(w, "ann")
    for number in range(12):
        read(w, f"other {number}")
    assert w.index.quotas.num_bytes.get(ANN, 0) == 0

    promotion = read(w, "ann")

    assert promotion.depths[: promotion.num_blocks].count(Tier.DISK.depth) == NUM_BLOCKS
    assert w.index.quotas.num_bytes[ANN] == NUM_BLOCKS * BLOCK_BYTES
    device = w.cache.residency.groups[0].pool
    slots = [device.find(name) for name in w.names("ann", DOCUMENT)]
    on_device = w.cache.residency.groups[0].owners.of(np.array([slot for slot in slots if slot is not None], np.intp))
    assert set(map(tenant_with, on_device.tolist())) == {ANN}
    w.check()


def test_a_chains_first_blocks_are_its_parents_on_disk() -> None:
    w = world({}, {})
    read(w, "ann")
    push_out(w)
    w.flush()

    disk, names = w.index.disk, w.names("ann", DOCUMENT)
    parents = {key: row.parent for key, row in w.store.rows.items()}
    assert [parents[disk.key(0, name)] for name in names] == [b"", *(disk.key(0, name) for name in names[:-1])]


def test_what_a_tenant_has_too_much_goes_though_all_of_it_stands_in_the_last_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_quotas, "MAX_SHED", 2)
    w = world({ANN: 0}, {})
    read(w, "ann")
    push_out(w)
    for _ in range(5):
        w.cache.poll()

    assert w.cache.statistics().host_tenants[ANN] == 0
    w.check()


@pytest.mark.parametrize("disk", [{}, {ANN: 3 * CHARGE}])
def test_blocks_that_a_quota_pushed_out_do_not_push_each_other_out_for_ever(disk: Mapping[bytes, int]) -> None:
    w = world({ANN: 2 * BLOCK_BYTES}, disk)
    read(w, "ann")

    def moved_at_rest() -> list[int]:
        for _ in range(20):
            w.cache.drain.spill_rest()
            w.settle()
        return [route.num_bytes for route in w.cache.statistics().routes.values()]

    at_rest = moved_at_rest()
    assert moved_at_rest() == at_rest
    assert w.cache.drain.spill_rest() == 0
    w.check()


def test_a_block_that_a_quota_pushed_out_is_told_from_one_that_never_came() -> None:
    w = world({ANN: 2 * BLOCK_BYTES}, {ANN: 3 * CHARGE})
    read(w, "ann")
    for _ in range(20):
        w.cache.drain.spill_rest()
        w.settle()
    push_out(w)

    misses = read(w, "ann").misses.reasons

    assert {reason for _, reason in misses} & {Reason.EVICTED_FROM_HOST, Reason.EVICTED_FROM_DISK}
    assert Reason.NEVER_SEEN not in {reason for _, reason in misses}
