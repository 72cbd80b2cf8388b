"""Lookups of engines, explained by the id that LMCache's client sends."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from lmcache_bed import CHUNK, Bed, RawClient, key, lmcache_bed

from kvtier.engine.observability.explain.explanation import Explanation, Why
from kvtier.sidecar.lmcache.explained_prompt import NOT_TOLD, explained_prompt
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.transfer.transfer_engine import Route

DOCUMENT = list(range(1000, 1000 + 6 * CHUNK + 3))  # six full chunks and a tail
WHOLE = 6 * CHUNK


@pytest.fixture
def bed(tmp_path: Path):
    with lmcache_bed(tmp_path) as found:
        yield found


@pytest.fixture
def client(bed: Bed) -> RawClient:
    found = RawClient(bed)
    found.register()
    return found


def explained(bed: Bed, request_id: str) -> Explanation:
    assert bed.layouts.explainer is not None
    (found,) = bed.layouts.explainer.find(request_id, None)
    return bed.layouts.explainer.evidence(found).explanation()


def answers(found: Explanation) -> list[tuple[int, Tier | None, object]]:
    return [(row.end, row.tier, row.why) for row in found.rows]


def test_a_lookup_is_a_miss_and_then_a_hit(bed: Bed, client: RawClient) -> None:
    client.lookup(DOCUMENT, "cold")
    client.store(DOCUMENT, "cold")
    client.lookup(DOCUMENT, "warm")

    assert answers(explained(bed, "cold")) == [
        (WHOLE, None, Reason.NEVER_SEEN),
        (len(DOCUMENT), None, Reason.LAST_BLOCK),
    ]
    assert answers(explained(bed, "warm"))[0] == (WHOLE, Tier.HOST, None)
    assert explained(bed, "warm").notes == (NOT_TOLD,)
    assert bed.layouts.explainer is not None
    assert bed.layouts.explainer.find("unknown", None) == []


def test_chunks_that_the_engine_has_itself_are_the_devices(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first", end=5 * CHUNK)
    configs = {"lmcache.hint.engine_computed_tokens": 2 * CHUNK + 3}

    client.lookup(DOCUMENT, "second", start=2 * CHUNK, request_configs=configs)
    client.lookup(DOCUMENT, "third", start=6 * CHUNK)

    assert answers(explained(bed, "second")) == [
        (2 * CHUNK, Tier.DEVICE, None),
        (5 * CHUNK, Tier.HOST, None),
        (6 * CHUNK, None, Reason.NEVER_SEEN),
        (len(DOCUMENT), None, Reason.LAST_BLOCK),
    ]
    assert answers(explained(bed, "third")) == [
        (6 * CHUNK, Tier.DEVICE, None),
        (len(DOCUMENT), None, Reason.LAST_BLOCK),
    ]


def test_a_prompt_without_a_full_chunk_or_a_token_is_explained_too(bed: Bed, client: RawClient) -> None:
    client.lookup([], "empty")
    client.lookup(DOCUMENT[:3], "short")

    assert answers(explained(bed, "empty")) == []
    assert answers(explained(bed, "short")) == [(3, None, Why.SHORT)]


def test_where_a_lookup_departs_from_the_nearest_is_told(bed: Bed, client: RawClient) -> None:
    client.lookup(DOCUMENT, "first")
    client.store(DOCUMENT, "first")
    client.lookup([*DOCUMENT[:21], 7, *DOCUMENT[:30]], "second")

    departure = explained(bed, "second").departure

    assert departure is not None
    assert (departure.num_shared, departure.departs) == (21, True)
    assert answers(explained(bed, "second"))[:2] == [
        (2 * CHUNK, Tier.HOST, None),
        (51 // CHUNK * CHUNK, None, Reason.NEVER_SEEN),
    ]


def test_a_salt_and_another_layout_are_named(bed: Bed, client: RawClient) -> None:
    client.register(instance_id=2, dtype_str="float16", model_name="n")
    client.lookup(DOCUMENT, "plain")
    client.store(DOCUMENT, "plain")
    client.lookup(DOCUMENT, "salted", cache_salt="secret")
    client.lookup(DOCUMENT, "half", model_name="n")

    salted, half = explained(bed, "salted").rows[0], explained(bed, "half").rows[0]

    assert (salted.why, salted.differs, salted.end) == (Why.OTHER, ("cache_salt",), WHOLE)
    assert (half.why, set(half.differs)) == (Why.OTHER, {"namespace: dtype", "namespace: model"})


def test_what_host_memory_evicted_is_told_with_its_cause(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, num_extents=1) as bed:
        client = RawClient(bed)
        client.register()
        client.store(DOCUMENT, "first")
        for number in range(5):
            client.store([number] * 8 * CHUNK, f"other {number}")
            bed.settle()
        client.lookup(DOCUMENT, "second")

        (row, *_) = explained(bed, "second").rows

    assert (row.why, row.cause) == (Reason.EVICTED_FROM_HOST, EvictionCause.ROOM)
    assert row.evicted_at is not None


def test_what_a_client_had_cleared_is_told_with_its_time(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    before = time.time()
    client.ask("clear", True)
    bed.settle()
    client.lookup(DOCUMENT, "second")

    (row, *_) = explained(bed, "second").rows

    assert (row.end, row.why, row.cause) == (WHOLE, Reason.EVICTED_FROM_HOST, EvictionCause.CLEARED)
    assert row.evicted_at is not None
    assert before - 1 < row.evicted_at[0] < time.time() + 1


def test_a_read_that_is_too_late_is_told(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, num_extents=1, store=MemoryStore(100 * 4608)) as bed:
        client = RawClient(bed)
        client.register()
        client.store(DOCUMENT, "first")
        bed.settle()
        for number in range(4):
            client.store([number] * 8 * CHUNK, f"other {number}")
            bed.settle()
        client.lookup(DOCUMENT, "read")
        client.ask("end_session", "read")
        for number in range(4):
            client.store([9 + number] * 8 * CHUNK, f"more {number}")
            bed.settle()
        bed.lanes[Route.DISK_TO_HOST].is_stopped = True
        client.send("lookup", key(DOCUMENT, "late", worker=None), 1)
        bed.settle()
        bed.pass_time(10.1)

        late = explained(bed, "late")
        bed.lanes[Route.DISK_TO_HOST].is_stopped = False
        bed.settle()

    assert answers(explained(bed, "read"))[0] == (WHOLE, Tier.DISK, None)
    assert late.rows[0].why is Reason.DEADLINE


def test_a_prompt_is_explained_that_nobody_has_looked_up(bed: Bed, client: RawClient) -> None:
    client.lookup(DOCUMENT, "first")
    client.store(DOCUMENT[: 2 * CHUNK], "first")
    chain = BlockChain(CHUNK)
    chain.extend(DOCUMENT)
    assert bed.layouts.explainer is not None

    (evidence,) = explained_prompt(bed.layouts, bed.layouts.explainer, "m", chain)
    found = evidence.explanation()

    assert found.request_id is None
    assert answers(found)[0] == (2 * CHUNK, Tier.HOST, None)
    assert replace(found, rows=()).num_tokens == len(DOCUMENT)
    assert explained_prompt(bed.layouts, bed.layouts.explainer, "unknown", chain) == []
