"""Engines that come and go, over a segment too small for what they store and a disk beside it: what is promised is
loaded, what is loaded is right, and nothing stays leased."""

from pathlib import Path

import pytest
from endpoint_play import play
from lmcache_bed import CHUNK, Bed, RawClient, key, lmcache_bed

from kvtier.store.memory_store import MemoryStore
from kvtier.transfer.transfer_engine import Route


@pytest.mark.parametrize("seed", range(6))
def test_what_is_promised_is_loaded_and_right(tmp_path: Path, seed: int) -> None:
    store = MemoryStore(40 * 4608) if seed % 2 else None
    with lmcache_bed(tmp_path, num_extents=2, store=store) as bed:
        looked_up: dict[str, int] = {}
        engines = play(bed, seed, 500, looked_up)

        promised = bed.endpoint.statistics().promised
        assert promised.num_loaded > 0, "the test does not load"
        for record in bed.layouts.records.newest():
            tokens = record.tokens
            assert tokens.num_tokens == looked_up[record.request_id]
            assert tokens.recomputed == sum(tokens.reasons.values()), "a token that was computed without a reason"
            assert min(tokens.host, tokens.disk, *tokens.reasons.values()) >= 0
        for engine in engines:
            engine.scheduler.close()
            engine.worker.close()
        bed.settle()
        assert bed.num_leases() == 0
        assert not bed.endpoint.statistics().num_promises


def test_a_hit_on_disk_is_promised_once_it_is_in_host_memory(tmp_path: Path) -> None:
    document = list(range(6 * CHUNK))
    with lmcache_bed(tmp_path, num_extents=1, store=MemoryStore(100 * 4608)) as bed:
        client = RawClient(bed)
        client.register()
        client.store(document, "first")
        bed.settle()
        for number in range(4):
            client.store([number] * 8 * CHUNK, f"other {number}")
            bed.settle()
        (tiers,) = bed.layouts
        assert tiers.tiers.status.statistics().disk is not None
        bed.lanes[Route.DISK_TO_HOST].is_stopped = True
        client.ask("lookup", key(document, "second", worker=None), 1)
        uid = client.send("status", "second")
        bed.settle()
        assert not client.socket.poll(0), "it was still in host memory"

        bed.lanes[Route.DISK_TO_HOST].is_stopped = False

        assert client.receive() == (uid, 9, 6)
        assert client.retrieve(document, "second")


def on_disk(client: RawClient, bed: Bed) -> list[int]:
    """A document of six chunks that is on disk only; host memory has something else."""
    document = list(range(6 * CHUNK))
    client.register()
    client.store(document, "first")
    bed.settle()
    for number in range(4):
        client.store([number] * 8 * CHUNK, f"other {number}")
        bed.settle()
    return document


def test_a_disk_that_hangs_makes_the_prefix_shorter(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, num_extents=1, store=MemoryStore(100 * 4608)) as bed:
        client = RawClient(bed)
        document = on_disk(client, bed)
        bed.lanes[Route.DISK_TO_HOST].is_stopped = True
        client.ask("lookup", key(document, "second", worker=None), 1)
        bed.settle()

        bed.pass_time(10.1)

        assert client.ask("status", "second") == 0
        bed.lanes[Route.DISK_TO_HOST].is_stopped = False
        bed.settle()
        client.ask("end_session", "second")
        assert bed.num_leases() == 0


@pytest.mark.parametrize("timeout_s", [0.5, 8.0])
def test_a_read_that_hangs_is_given_up_after_its_time_and_the_disk_left_alone(tmp_path: Path, timeout_s: float) -> None:
    with lmcache_bed(tmp_path, 1, MemoryStore(100 * 4608), read_timeout_s=timeout_s) as bed:
        scheduler = RawClient(bed)
        document = on_disk(scheduler, bed)
        bed.lanes[Route.DISK_TO_HOST].is_stopped = True
        scheduler.ask("lookup", key(document, "second", worker=None), 1)
        bed.pass_time(timeout_s - 0.1)
        assert bed.num_leases() == 6

        bed.pass_time(0.2)

        (tiers,) = bed.layouts
        assert scheduler.ask("status", "second") == 0
        assert bed.endpoint.counts().lost["late"] == 6
        assert not tiers.tiers.status.is_readable
        assert scheduler.lookup(document, "third") == 0  # at once
        bed.lanes[Route.DISK_TO_HOST].is_stopped = False
        bed.pass_time(120)
        assert tiers.tiers.status.is_readable


def test_a_read_that_no_lookup_waits_for_any_more_is_given_up_too(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, 1, MemoryStore(100 * 4608), read_timeout_s=30.0) as bed:
        scheduler = RawClient(bed)
        document = on_disk(scheduler, bed)
        bed.lanes[Route.DISK_TO_HOST].is_stopped = True
        scheduler.ask("lookup", key(document, "second", worker=None), 1)
        bed.pass_time(10.1)
        (tiers,) = bed.layouts
        assert scheduler.ask("status", "second") == 0
        assert tiers.tiers.status.is_readable, "a lookup's patience is not the disk's"

        bed.pass_time(20)

        assert not tiers.tiers.status.is_readable
        bed.lanes[Route.DISK_TO_HOST].is_stopped = False
        bed.settle()


def test_a_lookup_waits_no_longer_than_a_read_may_take(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, read_timeout_s=2.0) as bed:
        client = RawClient(bed)
        client.register()
        bed.lanes[Route.DEVICE_TO_HOST].is_stopped = True  # a lookup waits for the digests of what is being stored
        client.store(list(range(6 * CHUNK)), "first")
        client.ask("lookup", key(list(range(6 * CHUNK)), "second", worker=None), 1)

        bed.pass_time(2.1)

        assert client.ask("status", "second") == 0
        bed.lanes[Route.DEVICE_TO_HOST].is_stopped = False
        bed.settle()
