"""Engines that come and go, over a segment too small for what they store and a disk beside it: what is promised is
loaded, what is loaded is right, and nothing stays leased."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from lmcache_bed import CHUNK, Bed, RawClient, content, key, lmcache_bed

from kvtier.store.memory_store import MemoryStore
from kvtier.transfer.transfer_engine import Route

DOCUMENTS = [[document, *range(1000, 1000 + CHUNK * num - 1)] for document, num in enumerate((3, 5, 8, 8, 12, 12))]


@dataclass
class Engine:
    """One worker with a scheduler, and the requests it has under way."""

    scheduler: RawClient
    worker: RawClient
    instance: int
    promised: dict[str, tuple[list[int], int]] = field(default_factory=dict)  # tokens, and chunks that are promised
    writing: dict[str, tuple[list[int], object]] = field(default_factory=dict)  # tokens, and where to


def attach(bed: Bed, instance: int) -> Engine:
    engine = Engine(RawClient(bed), RawClient(bed), instance)
    engine.worker.register(instance_id=instance)
    return engine


def prompt(rng: random.Random) -> list[int]:
    document = rng.choice(DOCUMENTS)
    return document[: rng.randrange(CHUNK, len(document) + 1)] + [rng.randrange(9)] * rng.randrange(2 * CHUNK)


def step(bed: Bed, rng: random.Random, engine: Engine, request: str) -> None:
    """Something that an engine may do now."""
    match rng.choice([0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 5, 5]):
        case 0 | 1:
            tokens = prompt(rng)
            found = engine.scheduler.lookup(tokens, request)
            assert 0 <= found <= len(tokens) // CHUNK
            engine.promised[request] = tokens, found
        case 2 if engine.promised:
            request = rng.choice(list(engine.promised))
            tokens, num_chunks = engine.promised.pop(request)
            local = rng.randrange(num_chunks + 1)
            if local:
                engine.scheduler.ask("free", key(tokens, request, worker=None, end=local * CHUNK), 1)
            if num_chunks > local:
                assert engine.worker.retrieve(
                    tokens, request, engine.instance, start=local * CHUNK, end=num_chunks * CHUNK
                ), "a promise was not kept"
            engine.scheduler.ask("end_session", request)
        case 3 if engine.promised:
            request = rng.choice(list(engine.promised))
            engine.scheduler.ask("end_session", request)
            del engine.promised[request]
        case 4:
            tokens = prompt(rng)
            answer = engine.worker.ask("prepare_store", key(tokens, request), engine.instance)
            engine.writing[request] = tokens, answer["context"]
        case 5 if engine.writing:
            request = rng.choice(list(engine.writing))
            tokens, context = engine.writing.pop(request)
            for slot, index in zip(context["slots"], context["chunk_indices"], strict=True):
                bed.bytes_of(slot)[:] = content(tokens, index)
            if context["slots"]:
                assert engine.worker.ask("commit_store", key(tokens, request), engine.instance, b"") is True


def flip_somewhere(bed: Bed, rng: random.Random) -> None:
    """Damage a byte of a chunk that no engine was promised."""
    for tiers in bed.layouts:
        pool = tiers.tiers.index.host[0].pool
        slots = [slot for slot in tiers.tiers.index.host_blocks[0].slots().tolist() if pool.is_free(slot)]
        if slots:
            tiers.memories[0].host_block(rng.choice(slots))[rng.randrange(1024)] ^= 1 << rng.randrange(8)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_promised_is_loaded_and_right(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    store = MemoryStore(40 * 4608) if seed % 2 else None
    with lmcache_bed(tmp_path, num_extents=2, store=store) as bed:
        bed.turn_s = 0.003
        engines = [attach(bed, number) for number in range(3)]
        for number in range(500):
            place = rng.randrange(len(engines))
            step(bed, rng, engines[place], f"r{number}")
            for lane in bed.lanes.values():
                lane.num_rests = rng.choice([0, 0, 0, 5, 20])
            if rng.random() < 0.05:
                flip_somewhere(bed, rng)
            if rng.random() < 0.02:
                engines[place].scheduler.close()
                engines[place].worker.close()
                engines[place] = attach(bed, 100 + number)
            if rng.random() < 0.01:
                engines[place].worker.ask("clear", True)
            bed.check()

        promised = bed.door.statistics().promised
        assert promised.num_loaded > 0, "the test does not load"
        for record in bed.layouts.records.newest():
            tokens = record.tokens
            assert tokens.recomputed == sum(tokens.reasons.values()), "a token that was computed without a reason"
            assert min(tokens.host, tokens.disk, *tokens.reasons.values()) >= 0
        for engine in engines:
            engine.scheduler.close()
            engine.worker.close()
        bed.settle()
        assert bed.num_leases() == 0
        assert not bed.door.statistics().num_promises


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
        assert tiers.tiers.statistics().disk is not None
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
        assert bed.door.counts().lost["late"] == 6
        assert not tiers.tiers.is_readable
        assert scheduler.lookup(document, "third") == 0  # at once
        bed.lanes[Route.DISK_TO_HOST].is_stopped = False
        bed.pass_time(120)
        assert tiers.tiers.is_readable


def test_a_read_that_no_lookup_waits_for_any_more_is_given_up_too(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, 1, MemoryStore(100 * 4608), read_timeout_s=30.0) as bed:
        scheduler = RawClient(bed)
        document = on_disk(scheduler, bed)
        bed.lanes[Route.DISK_TO_HOST].is_stopped = True
        scheduler.ask("lookup", key(document, "second", worker=None), 1)
        bed.pass_time(10.1)
        (tiers,) = bed.layouts
        assert scheduler.ask("status", "second") == 0
        assert tiers.tiers.is_readable, "a lookup's patience is not the disk's"

        bed.pass_time(20)

        assert not tiers.tiers.is_readable
        bed.lanes[Route.DISK_TO_HOST].is_stopped = False
        bed.settle()


def test_a_lookup_waits_no_longer_than_a_read_may_take(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, read_timeout_s=2.0) as bed:
        client = RawClient(bed)
        client.register()
        client.store(list(range(6 * CHUNK)), "first")
        bed.lanes[Route.HOST_TO_DEVICE].is_stopped = True  # where chunks are verified
        client.ask("lookup", key(list(range(6 * CHUNK)), "second", worker=None), 1)

        bed.pass_time(2.1)

        assert client.ask("status", "second") == 0
        bed.lanes[Route.HOST_TO_DEVICE].is_stopped = False
        bed.settle()
