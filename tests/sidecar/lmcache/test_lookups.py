"""Where the tokens of engines' lookups came from, and why some were not here."""

from pathlib import Path

import pytest
from lmcache_bed import CHUNK, Bed, RawClient, content, key, lmcache_bed

from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.lower.statistics import TierStatistics, TokenBalance
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.transfer.transfer_engine import Route

DOCUMENT = list(range(1000, 1000 + 6 * CHUNK + 3))  # six full chunks and a tail


def last(bed: Bed) -> RequestRecord:
    return bed.layouts.records.newest()[0]


def test_a_lookup_has_one_record_that_adds_up(bed: Bed, client: RawClient) -> None:
    client.lookup(DOCUMENT, "cold")
    client.store(DOCUMENT, "cold")
    client.lookup(DOCUMENT, "warm")
    client.retrieve(DOCUMENT, "warm")

    warm, cold = bed.layouts.records.newest()

    assert (cold.request_id, warm.request_id) == ("cold", "warm")
    reasons = {Reason.NEVER_SEEN: 6 * CHUNK, Reason.LAST_BLOCK: 3}
    assert cold.tokens == TokenBalance(recomputed=len(DOCUMENT), reasons=reasons)
    assert warm.tokens == TokenBalance(host=6 * CHUNK, recomputed=3, reasons={Reason.LAST_BLOCK: 3})
    assert bed.endpoint.counts().tokens == cold.tokens.plus(warm.tokens)


@pytest.mark.parametrize(
    ("start", "told", "on_device"),
    [
        (0, 0, 0),
        (2, 2 * CHUNK, 2 * CHUNK),
        (2, 2 * CHUNK + 3, 2 * CHUNK + 3),  # it loads the third chunk, and has three tokens of it
        (2, None, 2 * CHUNK),  # a client that does not tell
        (2, "2", 2 * CHUNK),
        (2, True, 2 * CHUNK),
        (2, -1, 2 * CHUNK),
        (6, 6 * CHUNK + 1, 6 * CHUNK + 1),
        (6, 1 << 62, len(DOCUMENT)),
    ],
)
def test_what_the_engine_has_itself_is_the_devices(
    bed: Bed, client: RawClient, start: int, told: object, on_device: int
) -> None:
    client.store(DOCUMENT, "first")
    configs = {"lmcache.hint.engine_computed_tokens": told}

    client.lookup(DOCUMENT, "second", start=start * CHUNK, request_configs=configs)

    num_computed = len(DOCUMENT) - max(on_device, 6 * CHUNK)
    assert last(bed).tokens == TokenBalance(
        device=on_device,
        host=max(0, 6 * CHUNK - on_device),
        recomputed=num_computed,
        reasons={Reason.LAST_BLOCK: num_computed} if num_computed else {},
    )


def test_what_the_engine_has_itself_and_is_not_here_is_no_miss(bed: Bed, client: RawClient) -> None:
    configs = {"lmcache.hint.engine_computed_tokens": 3 * CHUNK + 1}

    client.lookup(DOCUMENT, "first", start=3 * CHUNK, request_configs=configs)

    reasons = {Reason.NEVER_SEEN: 3 * CHUNK - 1, Reason.LAST_BLOCK: 3}
    assert last(bed).tokens == TokenBalance(device=3 * CHUNK + 1, recomputed=3 * CHUNK + 2, reasons=reasons)


def test_what_is_read_from_disk_counts_as_the_disks(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, num_extents=1, store=MemoryStore(100 * 4608)) as bed:
        client = RawClient(bed)
        client.register()
        client.store(DOCUMENT, "first")
        bed.settle()
        for number in range(4):
            client.store([number] * 8 * CHUNK, f"other {number}")
            bed.settle()

        client.lookup(DOCUMENT, "second")

        assert last(bed).tokens.disk == 6 * CHUNK


def test_a_chunk_that_host_memory_dropped_is_said_to_be_evicted_from_it(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, num_extents=1) as bed:
        client = RawClient(bed)
        client.register()
        client.store(DOCUMENT, "first")
        for number in range(5):
            client.store([number] * 8 * CHUNK, f"other {number}")
            bed.settle()

        num_found = client.lookup(DOCUMENT, "second")

        assert num_found < 6
        assert last(bed).tokens.reasons[Reason.EVICTED_FROM_HOST] == (6 - num_found) * CHUNK


def test_a_flipped_byte_is_the_reason_of_all_that_comes_after_it(bed: Bed, client: RawClient) -> None:
    slots = client.ask("prepare_store", key(DOCUMENT, "first"), 1)["context"]["slots"]
    for chunk, slot in enumerate(slots):
        bed.bytes_of(slot)[:] = content(DOCUMENT, chunk)
    client.ask("commit_store", key(DOCUMENT, "first"), 1, b"")
    bed.settle()
    bed.bytes_of(slots[3])[100] ^= 64
    assert not client.retrieve(DOCUMENT, "first")

    assert client.lookup(DOCUMENT + DOCUMENT, "second") == 3

    tokens = last(bed).tokens
    assert tokens.reasons[Reason.CORRUPT] == 9 * CHUNK
    assert tokens.num_tokens == tokens.host + sum(tokens.reasons.values())


def test_chunks_that_come_too_late_are_said_to_be_late(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, num_extents=1, store=MemoryStore(100 * 4608)) as bed:
        client = RawClient(bed)
        client.register()
        client.store(DOCUMENT, "first")
        bed.settle()
        for number in range(4):
            client.store([number] * 8 * CHUNK, f"other {number}")
            bed.settle()
        bed.lanes[Route.DISK_TO_HOST].is_stopped = True
        client.ask("lookup", key(DOCUMENT, "second", worker=None), 1)
        bed.settle()

        bed.pass_time(10.1)

        assert last(bed).tokens.reasons[Reason.DEADLINE] == 6 * CHUNK
        bed.lanes[Route.DISK_TO_HOST].is_stopped = False


def test_what_other_sizes_would_find_is_told_of_all_lookups(bed: Bed, client: RawClient) -> None:
    host = {Tier.HOST: TierStatistics(capacity_bytes=1 << 20)}
    assert bed.layouts.what_if.hit_ratios(host) == {}

    client.lookup(DOCUMENT, "cold")
    client.store(DOCUMENT, "cold")
    client.lookup(DOCUMENT, "warm")
    client.retrieve(DOCUMENT, "warm")

    found = bed.layouts.what_if.hit_ratios(host)[Tier.HOST]
    assert found[1.0] == 6 * CHUNK / (2 * len(DOCUMENT))


def test_a_request_that_ends_before_its_answer_has_no_record(bed: Bed, client: RawClient) -> None:
    bed.lanes[Route.DEVICE_TO_HOST].is_stopped = True  # a lookup waits for the digests of what is being stored
    client.store(DOCUMENT, "first")
    client.ask("lookup", key(DOCUMENT, "second", worker=None), 1)

    client.ask("end_session", "second")

    bed.lanes[Route.DEVICE_TO_HOST].is_stopped = False
    bed.settle()
    assert "second" not in {each.request_id for each in bed.layouts.records.newest()}
