"""Engines with several KV cache groups, of which some need the last chunks of a prefix only."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from endpoint_play import play
from hybrid_client import FULL, NUM_BYTES, SHAPES, WINDOW, HybridClient
from lmcache_bed import CHUNK, Bed, RawClient, content, key, lmcache_bed

from kvtier.engine.observability.explain.explanation import Explanation
from kvtier.sidecar.lmcache.chunk_layout import ChunkLayout
from kvtier.sidecar.lmcache.explained_prompt import explained_prompt
from kvtier.sidecar.lmcache.token_keys import blocks_of_tokens
from kvtier.sidecar.pins import Pins
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import Fault
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.transfer.transfer_engine import Route

DOCUMENT = list(range(1000, 1000 + 6 * CHUNK + 3))  # six full chunks and a tail
OTHERS = [[number] * 8 * CHUNK for number in range(4)]


@pytest.fixture
def client(bed: Bed) -> Iterator[HybridClient]:
    """A client with a worker's registration as instance 1, of two groups."""
    client = HybridClient(bed)
    client.register()
    yield client
    client.socket.close(0)


def test_what_one_engine_stores_another_loads(bed: Bed, client: HybridClient) -> None:
    assert client.lookup(DOCUMENT, "cold") == 0
    assert client.store_parts(DOCUMENT, "cold") == [(group, chunk) for group in (0, 1) for chunk in range(6)]
    other = HybridClient(bed)
    other.register(instance_id=2)

    assert other.lookup(DOCUMENT, "warm") == 6

    assert bed.num_leases() == 6 + 2
    assert other.retrieve(DOCUMENT, "warm", instance=2)
    assert bed.num_leases() == 0
    assert bed.endpoint.statistics().promised.num_loaded == 6
    assert client.store_parts(DOCUMENT, "again") == []


def test_each_group_has_slots_of_its_own_shape(client: HybridClient) -> None:
    context = client.ask("prepare_store", key(DOCUMENT, "r"), 1)["context"]

    found = {
        (group, tuple(slot["shape"]), slot["dtype"], slot["length"])
        for slot, group in zip(context["slots"], context["group_ids"], strict=True)
    }
    assert found == {(0, tuple(SHAPES[0]), "bfloat16", NUM_BYTES[0]), (1, tuple(SHAPES[1]), "float32", NUM_BYTES[1])}


def test_a_group_that_keeps_the_end_of_each_chunk_has_slots_for_that(bed: Bed) -> None:
    client = RawClient(bed)
    client.register(group_layouts=[FULL, {**WINDOW, "window_tokens": 4, "window_chunks": 1}])

    context = client.ask("prepare_store", key(DOCUMENT, "r"), 1)["context"]

    assert context["slots"][-1]["shape"] == [2, 4, 4, 8]


def test_chunks_that_the_engine_does_not_have_get_no_slot_and_are_not_found(client: HybridClient) -> None:
    assert client.store_parts(DOCUMENT, "first", skipped=[0, 1, 2, 3])[6:] == [(1, 4), (1, 5)]

    assert client.lookup(DOCUMENT, "whole") == 6
    assert client.retrieve(DOCUMENT, "whole")
    assert client.lookup(DOCUMENT[: 5 * CHUNK], "shorter") == 0


@pytest.mark.parametrize(("skipped", "found"), [([3, 4, 5], 3), ([1, 3, 4, 5], 1), ([2, 5], 5), ([0, 2, 4], 0)])
def test_a_hit_ends_where_each_group_has_what_it_needs(
    bed: Bed, client: HybridClient, skipped: list[int], found: int
) -> None:
    client.store_parts(DOCUMENT, "first", skipped=skipped)

    assert client.lookup(DOCUMENT, "second") == found
    assert bed.num_leases() == found + min(found, 2)
    assert not found or client.retrieve(DOCUMENT, "second", end=found * CHUNK)


def test_a_window_reaches_no_further_than_what_the_engine_has_itself(bed: Bed, client: HybridClient) -> None:
    client.store_parts(DOCUMENT, "first", skipped=[0, 1, 2, 3, 4])

    assert client.lookup(DOCUMENT, "second") == 0
    assert client.lookup(DOCUMENT, "third", start=5 * CHUNK) == 6

    assert bed.num_leases() == 2
    assert client.retrieve(DOCUMENT, "third", start=5 * CHUNK)


def test_a_load_may_begin_within_what_was_promised_and_end_before(bed: Bed, client: HybridClient) -> None:
    client.store_parts(DOCUMENT, "first")
    assert client.lookup(DOCUMENT, "second") == 6
    bed.settle()
    bed.lanes["host_to_device"].is_stopped = True  # what is not promised would wait for its digest

    assert client.retrieve(DOCUMENT, "second", start=5 * CHUNK)

    bed.lanes["host_to_device"].is_stopped = False
    assert client.lookup(DOCUMENT, "third") == 6
    assert client.retrieve(DOCUMENT, "third", end=4 * CHUNK)
    client.ask("end_session", "second")
    client.ask("end_session", "third")
    assert bed.num_leases() == 0


def test_what_is_not_loaded_is_let_go_in_every_group(bed: Bed, client: HybridClient) -> None:
    client.store_parts(DOCUMENT, "first")
    client.lookup(DOCUMENT, "second")

    client.ask("free", key(DOCUMENT, "second", worker=None, end=5 * CHUNK), 1)

    assert bed.num_leases() == 2
    client.ask("free", key(DOCUMENT, "second", worker=None), 1)
    assert bed.num_leases() == 0


def damaged(bed: Bed, client: HybridClient, *parts: tuple[int, int]) -> None:
    """Store the document, and damage some parts of it, given as group and chunk."""
    own = key(DOCUMENT, "first")
    context = client.ask("prepare_store", own, 1)["context"]
    client.write(context, own)
    assert client.ask("commit_store", own, 1, b"") is True
    bed.settle()
    stored = list(zip(context["group_ids"], context["chunk_indices"], strict=True))
    for group, chunk in parts:
        bed.bytes_of(context["slots"][stored.index((group, chunk))], NUM_BYTES[group])[7] ^= 1


@pytest.mark.parametrize(
    ("group", "chunk", "found"), [(0, 2, 2), (0, 5, 5), (1, 5, 5), (1, 4, 4), (1, 0, 6), (0, 0, 0)]
)
def test_damage_matters_where_a_group_needs_the_chunk(
    bed: Bed, client: HybridClient, group: int, chunk: int, found: int
) -> None:
    damaged(bed, client, (group, chunk))
    assert client.lookup(DOCUMENT, "second") == 6

    assert client.retrieve(DOCUMENT, "second") == (found == 6)

    client.ask("end_session", "second")
    assert bed.endpoint.statistics().promised.num_corrupt == (found < 6)
    assert client.lookup(DOCUMENT, "third") == found
    assert bed.num_leases() == found + min(found, 2)
    assert not found or client.retrieve(DOCUMENT, "third", end=found * CHUNK)
    client.ask("end_session", "third")
    assert bed.num_leases() == 0


def test_what_is_damaged_is_stored_again(bed: Bed, client: HybridClient) -> None:
    damaged(bed, client, (1, 5))
    assert client.lookup(DOCUMENT, "second") == 6
    assert not client.retrieve(DOCUMENT, "second")

    assert client.store_parts(DOCUMENT, "second") == [(1, 5)]

    assert client.lookup(DOCUMENT, "third") == 6
    assert client.retrieve(DOCUMENT, "third")


def test_every_rank_has_parts_of_its_own(bed: Bed) -> None:
    workers = [HybridClient(bed), HybridClient(bed)]
    for rank, worker in enumerate(workers):
        worker.register(instance_id=10 + rank, world_size=2)
        skipped = [5] * rank
        worker.store_parts(DOCUMENT, "first", skipped, 10 + rank, worker=rank, world_size=2)

    assert workers[0].lookup(DOCUMENT, "second", world_size=2) == 5

    assert bed.num_leases() == 2 * (5 + 2)
    for rank, worker in enumerate(workers):
        assert worker.retrieve(DOCUMENT, "second", 10 + rank, worker=rank, world_size=2, end=5 * CHUNK)
    assert bed.num_leases() == 0


def test_nothing_is_found_before_every_group_is_committed(bed: Bed, client: HybridClient) -> None:
    own = key(DOCUMENT, "first")
    context = client.ask("prepare_store", own, 1)["context"]
    assert client.lookup(DOCUMENT, "before") == 0
    client.write(context, own)
    bed.lanes["device_to_host"].is_stopped = True  # where digests are taken
    assert client.ask("commit_store", own, 1, b"") is True
    client.ask("lookup", key(DOCUMENT, "second", worker=None), 1)
    uid = client.send("status", "second")
    bed.settle()
    assert not client.socket.poll(0)

    bed.lanes["device_to_host"].is_stopped = False

    assert client.receive() == (uid, 9, 6)


def test_a_worker_that_dies_while_it_copies_leaves_no_lease(bed: Bed, client: HybridClient) -> None:
    client.store_parts(DOCUMENT, "first")
    client.prepare_retrieve(DOCUMENT, "second")
    client.ask("prepare_store", key(DOCUMENT[::-1], "third"), 1)
    assert bed.num_leases() == (6 + 2) + 2 * 6

    client.close()

    assert bed.num_leases() == 0


@pytest.mark.parametrize("skipped", [[[0]], [[0], [0], [0]], [[], [6]]])
def test_skipped_chunks_that_a_worker_cannot_mean_are_refused(
    bed: Bed, client: HybridClient, skipped: list[list[int]]
) -> None:
    context = client.ask("prepare_store", key(DOCUMENT, "r"), 1, skipped)["context"]

    assert context == {"slots": [], "chunk_indices": [], "group_ids": []}
    assert bed.refusals.counts == {"range": 1}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"window_tokens": CHUNK + 1}, "group 1 has 9 tokens of each chunk, but a chunk has 8"),
        ({"recurrent": True, "window_chunks": 0}, "group 1 has recurrent states, but needs all chunks"),
        ({"dtype_str": "complex64"}, "dtype 'complex64' is not known"),
        ({"num_layers": 1 << 20}, "an extent 65536"),
    ],
)
def test_groups_that_have_no_place_are_refused_and_send_no_bytes(
    bed: Bed, changed: dict[str, object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = HybridClient(bed)

    answer = client.register(group_layouts=[FULL, {**WINDOW, **changed}])

    assert answer["pool_size"] == bed.segment.num_bytes
    assert why in caplog.text
    assert client.ask("prepare_store", key(DOCUMENT, "r"), 1)["context"]["slots"] == []
    assert client.lookup(DOCUMENT, "r") == 0


def test_an_engine_with_more_groups_than_there_are_extents_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with lmcache_bed(tmp_path, num_extents=3) as bed:
        client = HybridClient(bed)

        client.register(world_size=2)
        assert "it needs 4, one for each of 2 KV cache groups in each of 2 ranks, and host memory has 3" in caplog.text
        assert client.store_parts(DOCUMENT, "r", world_size=2) == []

        client.register()
        assert client.store_parts(DOCUMENT, "r") != []


@pytest.mark.parametrize(
    "changed",
    [
        {"num_layers": 5},
        {"hidden_dim_size": 9},
        {"dtype_str": "int8"},
        {"tokens_per_block": 2},
        {"window_tokens": 4},
        {"kv_size": 1},
        {"window_chunks": 3},
        {"recurrent": True},
    ],
)
def test_engines_whose_groups_differ_have_no_chunk_in_common(
    bed: Bed, client: HybridClient, changed: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    client.store_parts(DOCUMENT, "first")
    other = HybridClient(bed)
    other.register(instance_id=2, group_layouts=[FULL, {**WINDOW, **changed}])

    assert client.lookup(DOCUMENT, "second") == 0  # it does not say for which
    assert "are attached with different layouts: groups" in caplog.text
    client.ask("unregister", 1)

    assert other.lookup(DOCUMENT, "second") == 0
    assert len({tiers.layout.digest for tiers in bed.layouts}) == 2  # their chunks on disk are apart, too


def test_groups_that_say_all_of_each_chunk_in_two_ways_are_equal(bed: Bed, client: HybridClient) -> None:
    client.store_parts(DOCUMENT, "first")
    other = HybridClient(bed)
    other.register(instance_id=2, group_layouts=[{**FULL, "window_tokens": 0, "kv_size": 0}, WINDOW])

    assert other.lookup(DOCUMENT, "second") == 6


def test_an_engine_of_one_group_has_the_namespace_that_it_had_before_there_were_several(bed: Bed) -> None:
    client = RawClient(bed)
    client.register(group_layouts=[])

    (tiers,) = bed.layouts

    assert tiers.layout == ChunkLayout("m", "", "bfloat16", 1, 4, 16, 4, CHUNK, CHUNK, 1)
    assert tiers.layout.digest.hex() == "83a8ce6da5d842451fcd26a1aba02bc7"


def test_states_are_found_where_one_was_kept(bed: Bed) -> None:
    client = HybridClient(bed)
    state = {**WINDOW, "window_tokens": 4, "window_chunks": 1, "recurrent": True}
    client.register(group_layouts=[FULL, state])
    own = key(DOCUMENT, "first")
    context = client.ask("prepare_store", own, 1, [[], [0, 1, 3, 4]])["context"]
    assert list(zip(context["group_ids"], context["chunk_indices"], strict=True))[6:] == [(1, 2), (1, 5)]
    client.ask("commit_store", own, 1, b"")

    assert [client.lookup(DOCUMENT[: num * CHUNK], str(num)) for num in (6, 5, 4, 3, 2)] == [6, 3, 3, 3, 0]

    found = client.prepare_retrieve(DOCUMENT, "6")["context"]
    assert list(zip(found["group_ids"], found["chunk_indices"], strict=True))[6:] == [(1, 5)]


def on_disk_only(bed: Bed) -> HybridClient:
    """A client whose document is on disk, and not in host memory."""
    client = HybridClient(bed)
    client.register()
    client.store_parts(DOCUMENT, "first")
    bed.settle()
    for number, other in enumerate(OTHERS):
        client.store_parts(other, f"other {number}")
        bed.settle()
    return client


def test_what_host_memory_has_no_more_comes_from_disk(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, num_extents=2, store=MemoryStore(200 * 4608)) as bed:
        client = on_disk_only(bed)

        assert client.lookup(DOCUMENT, "second") == 6

        assert client.retrieve(DOCUMENT, "second")
        assert bed.layouts.records.newest()[0].tokens == TokenBalance(
            disk=6 * CHUNK, recomputed=3, reasons={Reason.LAST_BLOCK: 3}
        )


def test_a_disk_that_hangs_makes_the_prefix_shorter(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, num_extents=2, store=MemoryStore(200 * 4608)) as bed:
        client = on_disk_only(bed)
        bed.lanes[Route.DISK_TO_HOST].is_stopped = True
        client.ask("lookup", key(DOCUMENT, "second", worker=None), 1)
        bed.settle()

        bed.pass_time(10.1)

        assert client.ask("status", "second") == 0
        bed.lanes[Route.DISK_TO_HOST].is_stopped = False
        bed.settle()
        client.ask("end_session", "second")
        assert bed.num_leases() == 0


class HalfReadable(MemoryStore):
    """A store that cannot read one of its records, which may be fine."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.unreadable = b""
        self.num_tries = 0

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        found = super().read_many(keys, outs)
        self.num_tries += self.unreadable in keys
        return [Fault.IO_ERROR if key == self.unreadable else each for key, each in zip(keys, found, strict=True)]


def test_a_chunk_that_cannot_be_read_is_asked_for_once_and_makes_the_prefix_shorter(tmp_path: Path) -> None:
    store = HalfReadable(200 * 4608)
    with lmcache_bed(tmp_path, num_extents=2, store=store) as bed:
        client = on_disk_only(bed)
        third = content(DOCUMENT, 2, 0, 0, NUM_BYTES[0])
        (store.unreadable,) = [stored for stored, row in store.rows.items() if row.payload == third]

        assert client.lookup(DOCUMENT, "second") == 2

        assert store.num_tries == 1
        assert bed.num_leases() == 2 + 2
        assert client.retrieve(DOCUMENT, "second", end=2 * CHUNK)


def test_who_may_not_have_all_leased_has_the_longest_hit_that_has_its_window(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, num_extents=9) as bed:  # 144 slots
        one, other = HybridClient(bed), HybridClient(bed)
        one.register()
        other.register(instance_id=2)
        first, second = list(range(30 * CHUNK)), list(range(9000, 9000 + 98 * CHUNK))
        one.store_parts(first, "a", skipped=range(28))
        other.store_parts(second, "b", [*range(48), *range(50, 96)], instance=2)
        assert one.lookup(first, "c") == 30
        assert bed.num_leases() == 32

        assert other.lookup(second, "d") == 50  # 96 chunks at most, as an eighth of what is free has to stay so

        assert bed.num_leases() == 32 + 52
        assert bed.endpoint.counts().lost["over_share"] == 48
        assert other.retrieve(second, "d", instance=2, end=50 * CHUNK)


def test_a_pin_keeps_what_each_group_needs(bed: Bed, client: HybridClient) -> None:
    client.store_parts(DOCUMENT, "first", skipped=[5])
    (tiers,) = bed.layouts
    pins = Pins(bed.layouts.shares, bed.clock)

    pins.pin("one", [(tiers, blocks_of_tokens(CHUNK, "", DOCUMENT))], 10.0)

    (found,) = pins.view("one") or []
    assert (found.num_tokens, found.num_chunks) == (5 * CHUNK, 5 + 2)
    assert [(lease.group, lease.num_chunks) for holder in pins.holders() for lease in holder.leases] == [(0, 5), (1, 2)]
    assert bed.num_leases() == 7
    pins.unpin("one")
    assert bed.num_leases() == 0


def answers(found: Explanation) -> list[tuple[int, Tier | None, object]]:
    return [(row.end, row.tier, row.why) for row in found.rows]


def test_a_prompt_is_explained_by_what_each_group_needs(bed: Bed, client: HybridClient) -> None:
    client.store_parts(DOCUMENT, "first", skipped=[0, 1, 2, 5])
    chain = BlockChain(CHUNK)
    chain.extend(DOCUMENT)
    assert bed.layouts.explainer is not None

    (evidence,) = explained_prompt(bed.layouts, bed.layouts.explainer, "m", chain)

    not_kept = [(5 * CHUNK, Tier.HOST, None), (6 * CHUNK, None, Reason.NOT_KEPT)]
    assert answers(evidence.explanation())[:2] == not_kept
    client.lookup(DOCUMENT, "second")
    (past,) = bed.layouts.explainer.find("second", None)
    assert answers(bed.layouts.explainer.evidence(past).explanation())[:2] == not_kept


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5])  # with 2 it may happen that nothing is loaded
def test_what_is_promised_is_loaded_and_right(tmp_path: Path, seed: int) -> None:
    store = MemoryStore(40 * 4608) if seed % 2 else None
    with lmcache_bed(tmp_path, num_extents=3, store=store) as bed:
        looked_up: dict[str, int] = {}
        engines = play(bed, seed, 1500, looked_up, HybridClient)

        assert bed.endpoint.statistics().promised.num_loaded > 0, "the test does not load"
        for record in bed.layouts.records.newest():
            tokens = record.tokens
            assert tokens.num_tokens == looked_up[record.request_id]
            assert tokens.recomputed == sum(tokens.reasons.values()), "a token that was computed without a reason"
        for engine in engines:
            engine.scheduler.close()
            engine.worker.close()
        bed.settle()
        assert bed.num_leases() == 0
        assert not bed.endpoint.statistics().num_promises
