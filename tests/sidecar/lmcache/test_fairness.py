"""Engines beside each other: what one floods, hoards or does not read is its own loss."""

from pathlib import Path

import pytest
from lmcache_bed import CHUNK, CHUNK_BYTES, Bed, RawClient, key, lmcache_bed

from kvtier.sidecar.lmcache import promises
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.naming.named_blocks import tenant_of

NUM_SLOTS = 128  # of the bed's segment, of 1 KiB chunks in pages


def document(number: int, num_chunks: int) -> list[int]:
    return list(range(number * 100_000, number * 100_000 + num_chunks * CHUNK))


def test_one_engine_cannot_lease_all_of_host_memory(bed: Bed, client: RawClient) -> None:
    for number in range(8):
        client.store(document(number, 16), "store")
    hoarder = RawClient(bed)
    promised = [hoarder.lookup(document(number, 16), f"request {number}") for number in range(8)]

    assert promised == [16] * 7 + [0]
    assert bed.num_leases() == 112
    assert bed.endpoint.counts().lost["over_share"] == 16

    newcomer = RawClient(bed)
    newcomer.register(instance_id=2)
    assert newcomer.store(document(9, 4), "own", instance=2) == [0, 1, 2, 3]
    assert newcomer.lookup(document(9, 4), "own") == 4
    assert newcomer.retrieve(document(9, 4), "own", instance=2)
    for number in range(7):
        assert client.retrieve(document(number, 16), f"request {number}")


def test_an_engine_with_another_layout_finds_room_too(bed: Bed, client: RawClient) -> None:
    client.store(document(1, 112), "store")
    hoarder = RawClient(bed)
    assert hoarder.lookup(document(1, 112), "hoard") == 112

    newcomer = RawClient(bed)
    newcomer.register(instance_id=2, model_name="other", dtype_str="float16")

    assert newcomer.store(document(2, 4), "own", instance=2, model_name="other") == [0, 1, 2, 3]
    assert newcomer.lookup(document(2, 4), "own", model_name="other") == 4


def test_one_engine_cannot_reserve_all_of_host_memory(bed: Bed, client: RawClient) -> None:
    slots = client.ask("prepare_store", key(document(1, 128), "all"), 1)["context"]["slots"]
    assert len(slots) == 112
    assert client.ask("prepare_store", key(document(2, 8), "more"), 1)["context"]["slots"] == []
    assert bed.endpoint.counts().lost["over_share"] == 16 + 8

    newcomer = RawClient(bed)
    newcomer.register(instance_id=2)
    assert newcomer.store(document(3, 8), "own", instance=2) == list(range(8))

    assert client.ask("commit_store", key(document(1, 128), "all"), 1, b"") is True
    bed.settle()
    assert client.store(document(2, 8), "more") == list(range(8))


def test_requests_for_the_same_chunks_cost_an_engine_nothing_more(bed: Bed, client: RawClient) -> None:
    client.store(document(1, 100), "store")
    scheduler = RawClient(bed)

    for user in range(20):
        assert scheduler.lookup(document(1, 100), f"user {user}") == 100

    for user in range(20):
        scheduler.ask("end_session", f"user {user}")
    assert bed.num_leases() == 0


def test_what_one_engine_reads_from_disk_leaves_room_for_others(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, store=MemoryStore(400 * 4608)) as bed:
        client = RawClient(bed)
        client.register()
        for number in range(20):
            client.store(document(number, 16), "store")
            bed.settle()
        bed.lanes["disk_to_host"].is_stopped = True
        flood = RawClient(bed)
        for number in range(8):
            flood.ask("lookup", key(document(number, 16), f"flood {number}", worker=None), 1)
        bed.settle()
        assert bed.num_leases() <= 112

        newcomer = RawClient(bed)
        newcomer.register(instance_id=2)
        assert newcomer.store(document(99, 8), "own", instance=2) == list(range(8))

        bed.lanes["disk_to_host"].is_stopped = False
        assert flood.ask("status", "flood 0") == 16
        flood.close()
        bed.settle()
        assert bed.num_leases() == 0


def test_while_one_engine_has_much_read_from_disk_the_others_are_read_for_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "COMING_BYTES", 4 * 4096)
    with lmcache_bed(tmp_path, store=MemoryStore(400 * 4608)) as bed:
        client = RawClient(bed)
        client.register()
        for number in range(20):
            client.store(document(number, 16), "store")
            bed.settle()
        bed.lanes["disk_to_host"].is_stopped = True
        flood, other = RawClient(bed), RawClient(bed)
        for number in range(7):
            flood.ask("lookup", key(document(number, 16), f"flood {number}", worker=None), 1)
        bed.settle()
        assert bed.num_leases() == 16  # one lookup's

        other.ask("lookup", key(document(8, 16), "other", worker=None), 1)
        bed.settle()
        assert bed.num_leases() == 32

        assert flood.lookup(document(19, 16), "in host memory") == 16
        bed.lanes["disk_to_host"].is_stopped = False
        assert other.ask("status", "other") == 16
        assert [flood.ask("status", f"flood {number}") for number in range(5)] == [16] * 5


def test_a_tenants_quota_bounds_what_its_requests_keep_in_host_memory(tmp_path: Path) -> None:
    tenant = tenant_of("ann")
    with lmcache_bed(tmp_path, quotas={tenant: 16 * CHUNK_BYTES}) as bed:
        client = RawClient(bed)
        client.register()
        client.store(document(1, 8), "bob's", cache_salt="bob")
        for number in range(2, 8):
            client.store(document(number, 12), "ann's", cache_salt="ann")
            bed.settle()
        (tiers,) = bed.layouts

        assert tiers.tiers.status.statistics().host_tenants[tenant] <= 16 * CHUNK_BYTES
        assert client.lookup(document(7, 12), "again", cache_salt="ann") == 12
        assert client.lookup(document(1, 8), "bob's", cache_salt="bob") == 8
        client.ask("end_session", "again")
        assert tiers.tiers.status.statistics().host_tenants[tenant] <= 16 * CHUNK_BYTES
