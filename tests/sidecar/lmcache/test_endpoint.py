"""What an engine asks for and gets, in the order of its days."""

from pathlib import Path

import pytest
from layout_bed import layout
from lmcache_bed import CHUNK, CHUNK_BYTES, OPS, REGISTRATION, Bed, RawClient, content, key, lmcache_bed
from waiting import wait_for

from kvtier.sidecar.lmcache.digest_lane import BATCH_CHUNKS, MAX_IN_FLIGHT, DigestLane
from kvtier.store.memory_store import MemoryStore
from kvtier.transfer.transfer_engine import Route

DOCUMENT = list(range(1000, 1000 + 6 * CHUNK + 3))  # six full chunks and a tail


def test_what_one_engine_stores_another_loads(bed: Bed, client: RawClient) -> None:
    assert client.lookup(DOCUMENT, "cold") == 0
    assert client.store(DOCUMENT, "cold") == [0, 1, 2, 3, 4, 5]
    other = RawClient(bed)
    other.register(instance_id=2)

    assert other.lookup(DOCUMENT, "warm") == 6
    assert other.retrieve(DOCUMENT, "warm", instance=2)

    client.ask("end_session", "cold")
    other.ask("end_session", "warm")
    assert bed.num_leases() == 0


def test_half_a_prompt_that_is_shared_is_half_a_hit(client: RawClient) -> None:
    client.store(DOCUMENT, "first")

    assert client.lookup(DOCUMENT[: 3 * CHUNK] + [7] * 30, "second") == 3


def test_another_salt_is_another_cache(client: RawClient) -> None:
    client.store(DOCUMENT, "first", cache_salt="a")

    assert client.lookup(DOCUMENT, "none") == 0
    assert client.lookup(DOCUMENT, "other", cache_salt="b") == 0
    assert client.lookup(DOCUMENT, "same", cache_salt="a") == 6


def test_a_store_is_asked_only_for_what_is_not_there(client: RawClient) -> None:
    client.store(DOCUMENT, "first", end=2 * CHUNK)

    assert client.store(DOCUMENT, "second") == [2, 3, 4, 5]
    assert client.store(DOCUMENT, "third") == []
    assert client.lookup(DOCUMENT, "fourth") == 6


def test_a_range_that_begins_later_is_stored_from_there_on(client: RawClient) -> None:
    client.store(DOCUMENT, "first", end=2 * CHUNK)

    assert client.store(DOCUMENT, "first", start=2 * CHUNK, end=4 * CHUNK) == [0, 1]
    assert client.lookup(DOCUMENT, "second") == 4
    assert client.retrieve(DOCUMENT, "second", start=CHUNK, end=4 * CHUNK)


def test_an_answer_has_the_segment_and_where_each_chunk_is(bed: Bed, client: RawClient) -> None:
    assert client.register(instance_id=9) == {"shm_name": f"/{bed.segment.name}", "pool_size": bed.segment.num_bytes}

    context = client.ask("prepare_store", key(DOCUMENT, "r"), 1)["context"]

    assert [slot["offset"] % 4096 for slot in context["slots"]] == [0] * 6
    assert {(slot["length"], *slot["shape"], slot["dtype"]) for slot in context["slots"]} == {
        (1024, 4, CHUNK, 16, "bfloat16")
    }


def test_two_planes_have_a_dimension_of_their_own(client: RawClient) -> None:
    client.register(instance_id=2, model_name="two", use_mla=False)

    slots = client.ask("prepare_store", key(DOCUMENT, "r", model_name="two"), 2)["context"]["slots"]

    assert slots[0]["shape"] == [2, 4, CHUNK, 16]
    assert slots[0]["length"] == 2048


def test_what_was_not_committed_is_never_found(bed: Bed, client: RawClient) -> None:
    client.ask("prepare_store", key(DOCUMENT, "first"), 1)
    client.ask("end_session", "first")

    assert client.lookup(DOCUMENT, "second") == 0
    client.close()
    assert bed.num_leases() == 0


def test_a_worker_that_is_stopped_while_it_writes_keeps_its_slots(bed: Bed, client: RawClient) -> None:
    client.ask("prepare_store", key(DOCUMENT, "r"), 1)

    bed.pass_time(3600)  # and says nothing: when it wakes up it goes on writing
    client.ask("ping", 1)
    bed.settle()

    assert bed.num_leases() == 6
    assert client.ask("commit_store", key(DOCUMENT, "r"), 1, b"") is True


def test_a_store_that_is_prepared_again_leaves_nothing_behind(bed: Bed, client: RawClient) -> None:
    client.ask("prepare_store", key(DOCUMENT, "r"), 1)
    client.ask("prepare_store", key(DOCUMENT, "r"), 1)

    assert bed.num_leases() == 6


def test_two_engines_that_compute_the_same_at_once_store_it_once(bed: Bed, client: RawClient) -> None:
    other = RawClient(bed)
    other.register(instance_id=2)
    first = client.ask("prepare_store", key(DOCUMENT, "a"), 1)["context"]["slots"]
    second = other.ask("prepare_store", key(DOCUMENT, "b"), 2)["context"]["slots"]
    for slots in (first, second):
        for chunk, slot in enumerate(slots):
            bed.bytes_of(slot)[:] = content(DOCUMENT, chunk)

    assert client.ask("commit_store", key(DOCUMENT, "a"), 1, b"") is True
    assert other.ask("commit_store", key(DOCUMENT, "b"), 2, b"") is True

    assert client.lookup(DOCUMENT, "c") == 6
    slots = client.prepare_retrieve(DOCUMENT, "c")["context"]["slots"]
    assert [slot["offset"] for slot in slots] == [slot["offset"] for slot in first]
    client.ask("commit_retrieve", key(DOCUMENT, "c"), 1)
    client.ask("end_session", "c")
    assert bed.num_leases() == 0


@pytest.mark.parametrize(
    ("configs", "found"),
    [
        ({"lmcache.skip_load": True}, 0),
        ({"lmcache.skip_load": False, "lmcache.other": [{"a": 1}]}, 6),
        ({"lmcache.hint.engine_computed_tokens": 8}, 6),
        ({}, 6),
    ],
)
def test_a_request_that_wants_no_load_is_told_of_nothing_and_stores(
    bed: Bed, client: RawClient, configs: dict[str, object], found: int
) -> None:
    client.store(DOCUMENT, "first", end=5 * CHUNK, request_configs=configs)
    client.store(DOCUMENT, "first", request_configs=configs)

    assert client.lookup(DOCUMENT, "second", request_configs=configs) == found
    client.ask("end_session", "second")
    assert bed.num_leases() == 0
    assert bed.refusals.counts == {}


def test_a_full_segment_refuses_stores_and_keeps_what_is_promised(bed: Bed, client: RawClient) -> None:
    documents = [list(range(10_000 * i, 10_000 * i + num * CHUNK)) for i, num in enumerate((64, 56, 7, 1))]
    for document in documents:
        client.store(document, "all")
    engines = [RawClient(bed) for _ in documents]
    for engine, document in zip(engines, documents, strict=True):
        assert engine.lookup(document, "promised") == len(document) // CHUNK

    assert client.ask("prepare_store", key(DOCUMENT, "more"), 1)["context"]["slots"] == []

    assert client.retrieve(documents[0], "promised")
    assert client.store(DOCUMENT, "more") == [0, 1, 2, 3, 4, 5]
    assert bed.endpoint.statistics().stored.num_without_room == 1


def test_what_is_left_of_the_room_is_given_to_the_first_chunks(bed: Bed, client: RawClient) -> None:
    client.ask("prepare_store", key(list(range(128 * CHUNK)), "all"), 1)
    second, third = RawClient(bed), RawClient(bed)
    second.register(instance_id=2)
    second.ask("prepare_store", key(list(range(50_000, 50_000 + 13 * CHUNK)), "most of the rest"), 2)
    third.register(instance_id=3)

    assert third.store(DOCUMENT, "more", instance=3) == [0, 1]


def test_a_lookup_waits_for_what_has_just_been_committed(bed: Bed, client: RawClient) -> None:
    bed.lanes["device_to_host"].is_stopped = True  # where digests are taken
    client.store(DOCUMENT, "first")
    client.ask("lookup", key(DOCUMENT, "second", worker=None), 1)
    uid = client.send("status", "second")
    bed.settle()
    assert not client.socket.poll(0)

    bed.lanes["device_to_host"].is_stopped = False

    assert client.receive() == (uid, 9, 6)


def test_a_status_is_held_for_a_twentieth_of_a_second_at_most(bed: Bed, client: RawClient) -> None:
    bed.lanes["device_to_host"].is_stopped = True  # where digests are taken
    client.store(DOCUMENT, "first")
    client.ask("lookup", key(DOCUMENT, "second", worker=None), 1)
    uid = client.send("status", "second")
    bed.until(lambda: bed.endpoint.is_waiting or None)
    bed.pass_time(0.049)
    assert not client.socket.poll(0)

    bed.pass_time(0.002)

    assert client.receive() == (uid, 9, None)
    bed.lanes["device_to_host"].is_stopped = False
    assert client.ask("status", "second") == 6


def test_a_lookup_does_not_wait_until_chunks_are_verified_and_a_load_does(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    bed.lanes["host_to_device"].is_stopped = True  # where chunks are verified
    assert client.lookup(DOCUMENT, "second") == 6
    uid = client.send("prepare_retrieve", key(DOCUMENT, "second"), 1)
    bed.settle()
    assert not client.socket.poll(0)

    bed.lanes["host_to_device"].is_stopped = False

    answered, _, answer = client.receive()
    assert answered == uid
    assert len(answer["context"]["slots"]) == 6


def test_a_load_whose_chunks_are_not_verified_in_time_is_refused(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    bed.lanes["host_to_device"].is_stopped = True
    assert client.lookup(DOCUMENT, "second") == 6
    uid = client.send("prepare_retrieve", key(DOCUMENT, "second"), 1)
    bed.until(lambda: bed.endpoint.is_waiting or None)

    bed.pass_time(3.1)

    assert client.receive() == (uid, 18, {"success": False, "data": b"", "context": {}})
    client.ask("end_session", "second")
    assert bed.num_leases() == 0
    bed.lanes["host_to_device"].is_stopped = False
    bed.settle()
    assert bed.endpoint.statistics().promised.num_corrupt == 0


def test_a_promise_of_all_local_tokens_is_let_go(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    client.lookup(DOCUMENT, "second")

    client.ask("free", key(DOCUMENT, "second", worker=None, end=len(DOCUMENT)), 1)

    assert bed.num_leases() == 0


def test_the_part_of_a_promise_that_is_not_loaded_is_let_go(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    client.lookup(DOCUMENT, "second")

    client.ask("free", key(DOCUMENT, "second", worker=None, end=2 * CHUNK + 3), 1)  # floored to whole chunks

    assert bed.num_leases() == 4
    assert client.retrieve(DOCUMENT, "second", start=2 * CHUNK)
    assert bed.num_leases() == 0


@pytest.mark.parametrize("ended_by", ["end_session", "connection", "time", "another lookup"])
def test_a_promise_ends(bed: Bed, client: RawClient, ended_by: str) -> None:
    client.store(DOCUMENT, "first")
    client.lookup(DOCUMENT, "second")
    assert bed.num_leases() == 6

    if ended_by == "end_session":
        client.ask("end_session", "second")
    elif ended_by == "connection":
        client.close()
    elif ended_by == "time":
        bed.pass_time(61)
    else:
        assert client.lookup([1, 2, 3], "second") == 0

    bed.settle()
    assert bed.num_leases() == 0


def test_a_chunk_stays_while_a_worker_copies_it_whatever_else_ends(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    scheduler = RawClient(bed)
    scheduler.lookup(DOCUMENT, "second")
    client.prepare_retrieve(DOCUMENT, "second")

    scheduler.ask("end_session", "second")  # the request was aborted
    scheduler.close()
    client.ask("clear", True)
    bed.pass_time(3600)  # the worker was stopped

    assert bed.num_leases() == 6
    client.ask("commit_retrieve", key(DOCUMENT, "second"), 1)
    assert bed.num_leases() == 0


def test_what_a_dead_worker_was_copying_is_let_go(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    other = RawClient(bed)
    other.register(instance_id=2)
    client.lookup(DOCUMENT, "second")
    other.prepare_retrieve(DOCUMENT, "second", instance=2)
    client.ask("end_session", "second")
    assert bed.num_leases() == 6

    other.close()

    assert bed.num_leases() == 0


def test_each_reader_has_its_own_lease(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    other = RawClient(bed)
    other.register(instance_id=2)
    client.lookup(DOCUMENT, "second", num_kv_readers=2)

    assert client.retrieve(DOCUMENT, "second", num_kv_readers=2)
    assert bed.num_leases() == 6
    assert other.retrieve(DOCUMENT, "second", instance=2, num_kv_readers=2)
    assert bed.num_leases() == 0


@pytest.mark.parametrize("deed", ["end_session", "free"])
def test_a_request_of_the_same_name_at_another_connection_ends_no_promise(
    bed: Bed, client: RawClient, deed: str
) -> None:
    client.store(DOCUMENT, "first")
    client.lookup(DOCUMENT, "0")
    other = RawClient(bed)
    other.lookup(DOCUMENT, "0")
    assert bed.num_leases() == 12

    other.ask(deed, *(["0"] if deed == "end_session" else [key(DOCUMENT, "0", worker=None), 1]))
    bed.lanes["host_to_device"].is_stopped = True  # what is not promised any more would wait for its digest

    assert client.retrieve(DOCUMENT, "0")


@pytest.mark.parametrize("deed", ["commit", "prepare", "unregister", "register", "read"])
def test_a_client_cannot_speak_for_the_worker_of_another(bed: Bed, client: RawClient, deed: str) -> None:
    own = key(DOCUMENT, "r")
    slots = client.ask("prepare_store", own, 1)["context"]["slots"]
    other = RawClient(bed)

    if deed == "commit":
        assert other.ask("commit_store", own, 1, b"") is False
    elif deed == "prepare":
        assert other.ask("prepare_store", own, 1)["context"]["slots"] == []
    elif deed == "unregister":
        other.ask("unregister", 1)
    elif deed == "register":
        other.register()
    else:
        assert other.prepare_retrieve(DOCUMENT, "r")["success"] is False

    assert bed.refusals.counts == {"foreign_worker": 1}
    assert bed.num_leases() == len(slots) == 6
    for chunk, slot in enumerate(slots):
        bed.bytes_of(slot)[:] = content(DOCUMENT, chunk)
    assert client.ask("commit_store", own, 1, b"") is True
    assert client.lookup(DOCUMENT, "s") == 6
    assert client.retrieve(DOCUMENT, "s")


def test_a_worker_whose_connection_has_ended_registers_at_its_next(bed: Bed, client: RawClient) -> None:
    again = RawClient(bed)
    again.register()  # before the end of the first is seen
    assert again.ask("prepare_store", key(DOCUMENT, "r"), 1)["context"]["slots"] == []
    client.close()

    again.register()

    assert again.ask("ping", 1) is True
    assert again.store(DOCUMENT, "r") == [0, 1, 2, 3, 4, 5]


def test_a_hit_is_what_all_ranks_have(bed: Bed) -> None:
    workers = [RawClient(bed), RawClient(bed)]
    for rank, worker in enumerate(workers):
        worker.register(instance_id=10 + rank, world_size=2)
        worker.store(DOCUMENT, "first", instance=10 + rank, worker=rank, world_size=2, end=(4 + rank) * CHUNK)

    assert workers[0].lookup(DOCUMENT, "second", world_size=2) == 4
    assert bed.num_leases() == 8
    for rank, worker in enumerate(workers):
        assert worker.retrieve(DOCUMENT, "second", 10 + rank, worker=rank, world_size=2, end=4 * CHUNK)
    assert bed.num_leases() == 0


def test_a_chunk_that_one_rank_has_lost_is_promised_to_none(bed: Bed) -> None:
    workers = [RawClient(bed), RawClient(bed)]
    for rank, worker in enumerate(workers):
        worker.register(instance_id=10 + rank, world_size=2)
        worker.store(DOCUMENT, "first", instance=10 + rank, worker=rank, world_size=2)
    slots = workers[1].prepare_retrieve(DOCUMENT, "look", 11, worker=1, world_size=2)["context"]["slots"]
    workers[1].ask("commit_retrieve", key(DOCUMENT, "look", worker=1, world_size=2), 11)
    bed.bytes_of(slots[2])[7] ^= 1
    assert not workers[1].retrieve(DOCUMENT, "look", 11, worker=1, world_size=2)

    assert workers[0].lookup(DOCUMENT, "second", world_size=2) == 2

    assert bed.num_leases() == 4
    for rank, worker in enumerate(workers):
        assert worker.retrieve(DOCUMENT, "second", 10 + rank, worker=rank, world_size=2, end=2 * CHUNK)


def test_a_chunk_that_the_disk_cannot_read_for_one_rank_is_promised_to_none(tmp_path: Path) -> None:
    store = MemoryStore(1 << 20)
    with lmcache_bed(tmp_path, num_extents=2, store=store) as bed:
        workers = [RawClient(bed), RawClient(bed)]
        for rank, worker in enumerate(workers):
            worker.register(instance_id=10 + rank, world_size=2)
        for number, tokens in enumerate((DOCUMENT, *([each] * 8 * CHUNK for each in range(4)))):
            for rank, worker in enumerate(workers):
                worker.store(tokens, f"stored {number}", instance=10 + rank, worker=rank, world_size=2)
                bed.settle()
        (third,) = [stored for stored, row in store.rows.items() if row.payload == content(DOCUMENT, 2, rank=1)]
        store.delete([third])

        assert workers[0].lookup(DOCUMENT, "second", world_size=2) == 2

        assert bed.num_leases() == 4


def test_chunks_that_no_request_needs_any_more_are_let_go_and_not_verified(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    bed.settle()
    bed.lanes["host_to_device"].is_stopped = True
    for request in "ab":
        assert client.lookup(DOCUMENT, request) == 6
    client.ask("end_session", "a")
    assert bed.num_leases() == 6
    client.ask("free", key(DOCUMENT, "b", worker=None, end=4 * CHUNK), 1)
    assert bed.num_leases() == 2

    client.ask("end_session", "b")

    assert bed.num_leases() == 0
    other = [7] * 9 * CHUNK
    client.store(other, "other")
    assert client.lookup(other, "c") == 9
    client.ask("end_session", "c")
    bed.lanes["host_to_device"].is_stopped = False
    bed.settle()
    assert num_read_to_verify(bed) == 6  # in flight when the first request ended
    assert bed.endpoint.statistics().promised.num_corrupt == 0


def test_a_load_without_a_promise_makes_one(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    client.lookup(DOCUMENT, "second")
    bed.pass_time(61)

    assert client.retrieve(DOCUMENT, "second", start=CHUNK)
    assert bed.num_leases() == 0
    assert not client.retrieve([*DOCUMENT[:CHUNK], *range(5 * CHUNK)], "third")
    assert bed.num_leases() == 0


def test_a_load_that_takes_too_long_without_a_promise_fails(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    bed.lanes["host_to_device"].is_stopped = True
    uid = client.send("prepare_retrieve", key(DOCUMENT, "second"), 1)
    bed.until(lambda: bed.endpoint.is_waiting or None)

    bed.pass_time(3.1)

    assert client.receive() == (uid, 18, {"success": False, "data": b"", "context": {}})
    assert client.ask("commit_retrieve", key(DOCUMENT, "second"), 1) is True


def test_a_lookup_promises_what_the_engine_lacks_and_tells_where_the_hit_ends(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first", end=5 * CHUNK)

    assert client.lookup(DOCUMENT, "second", start=2 * CHUNK) == 5

    assert bed.num_leases() == 3
    assert bed.endpoint.statistics().promised.num_promised == 3
    bed.lanes["host_to_device"].is_stopped = True  # what is not promised would wait for its digest
    assert client.retrieve(DOCUMENT, "second", start=2 * CHUNK, end=5 * CHUNK)
    assert bed.num_leases() == 0


@pytest.mark.parametrize("start", [0, 2, 6])
def test_a_lookup_of_no_chunk_is_told_that_what_the_engine_has_is_here(bed: Bed, client: RawClient, start: int) -> None:
    client.store(DOCUMENT, "first")

    assert client.lookup(DOCUMENT, "second", start=start * CHUNK, end=start * CHUNK) == start
    assert bed.num_leases() == 0


@pytest.mark.parametrize("num_here", [0, 1])
def test_a_lookup_after_a_beginning_that_is_not_here_is_told_how_much_of_that_is_here(
    bed: Bed, client: RawClient, num_here: int
) -> None:
    if num_here:
        client.store(DOCUMENT, "first", end=num_here * CHUNK)
    client.store(DOCUMENT, "first", start=2 * CHUNK)

    assert client.lookup(DOCUMENT, "second", start=2 * CHUNK) == num_here  # from where the engine stores it again

    assert bed.num_leases() == 0
    assert client.store(DOCUMENT, "second", start=num_here * CHUNK) == list(range(2 - num_here))
    assert client.lookup(DOCUMENT, "third", start=2 * CHUNK) == 6


def test_a_lookup_waits_for_the_beginning_that_has_just_been_committed(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first", start=2 * CHUNK)
    bed.settle()
    bed.lanes["device_to_host"].is_stopped = True
    client.store(DOCUMENT, "first", end=2 * CHUNK)
    client.ask("lookup", key(DOCUMENT, "second", worker=None, start=2 * CHUNK), 1)
    uid = client.send("status", "second")
    bed.settle()
    assert not client.socket.poll(0)

    bed.lanes["device_to_host"].is_stopped = False

    assert client.receive() == (uid, 9, 6)


def test_an_engine_whose_own_hit_has_shrunk_is_promised_all_from_there_on(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    assert client.lookup(DOCUMENT, "second", start=4 * CHUNK) == 6

    assert client.lookup(DOCUMENT, "second") == 6

    assert bed.num_leases() == 6
    assert client.retrieve(DOCUMENT, "second")
    assert bed.num_leases() == 0


def test_a_lookup_that_ends_before_its_answer_claims_nothing(bed: Bed, client: RawClient) -> None:
    bed.lanes["device_to_host"].is_stopped = True  # a lookup waits for the digests of what is being stored
    client.store(DOCUMENT, "first")
    client.ask("lookup", key(DOCUMENT, "second", worker=None, start=2 * CHUNK), 1)
    uid = client.send("status", "second")
    bed.until(lambda: bed.endpoint.is_waiting or None)

    client.send("end_session", "second")

    assert client.receive()[0] == uid + 1
    assert client.receive() == (uid, 9, 0)
    bed.lanes["device_to_host"].is_stopped = False


def test_a_lookup_that_begins_after_its_tokens_is_refused(bed: Bed, client: RawClient) -> None:
    assert client.lookup(DOCUMENT, "r", start=7 * CHUNK, end=8 * CHUNK) == 0

    assert bed.refusals.counts == {"range": 1}


def test_what_engines_have_themselves_is_used_too_and_is_not_evicted_first(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, num_extents=1) as bed:  # sixteen slots
        client = RawClient(bed)
        client.register()
        client.store(DOCUMENT, "first")
        client.store([1] * 8 * CHUNK, "other")

        assert client.lookup(DOCUMENT, "second", start=4 * CHUNK) == 6
        assert client.retrieve(DOCUMENT, "second", start=4 * CHUNK)
        client.store([2] * 8 * CHUNK, "another")

        assert client.lookup(DOCUMENT, "third") == 6


def test_a_chunk_that_comes_into_a_slot_while_its_former_one_is_verified_is_not_taken_for_it(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, num_extents=1) as bed:  # sixteen slots
        client = RawClient(bed)
        client.register()
        client.store(DOCUMENT, "first")
        bed.settle()
        bed.lanes["host_to_device"].is_stopped = True
        assert client.lookup(DOCUMENT, "second") == 6
        bed.settle()
        client.ask("free", key(DOCUMENT, "second", worker=None, end=4 * CHUNK), 1)
        assert len(client.store([7] * 12 * CHUNK, "other")) == 12
        bed.settle()

        bed.lanes["host_to_device"].is_stopped = False

        assert client.retrieve(DOCUMENT, "second", start=4 * CHUNK)
        assert bed.endpoint.statistics().promised.num_corrupt == 0


def stored_and_damaged(bed: Bed, client: RawClient, *chunks: int) -> list[dict[str, int]]:
    """Store the document, and flip a bit of some chunks as a foul client can; where all of its chunks are."""
    own = key(DOCUMENT, "first")
    context = client.ask("prepare_store", own, 1)["context"]
    client.write(context, own)
    assert client.ask("commit_store", own, 1, b"") is True
    bed.settle()
    for chunk in chunks:
        bed.bytes_of(context["slots"][chunk])[100] ^= 64
    return list(context["slots"])


def test_a_chunk_that_was_written_to_after_its_commit_is_not_loaded(bed: Bed, client: RawClient) -> None:
    stored_and_damaged(bed, client, 3)
    assert client.lookup(DOCUMENT, "second") == 6  # nothing is read for that

    assert client.prepare_retrieve(DOCUMENT, "second") == {"success": False, "data": b"", "context": {}}

    client.ask("end_session", "second")
    assert bed.num_leases() == 0
    assert bed.endpoint.statistics().promised.num_corrupt == 1
    assert client.lookup(DOCUMENT, "third") == 3
    assert client.retrieve(DOCUMENT, "third", end=3 * CHUNK)
    assert client.store(DOCUMENT, "third") == [3]
    assert client.lookup(DOCUMENT, "fourth") == 6
    assert client.retrieve(DOCUMENT, "fourth")


def test_the_chunks_before_one_that_is_damaged_are_loaded(bed: Bed, client: RawClient) -> None:
    stored_and_damaged(bed, client, 3)
    client.lookup(DOCUMENT, "second")

    assert client.retrieve(DOCUMENT, "second", end=3 * CHUNK)
    assert not client.retrieve(DOCUMENT, "second", start=3 * CHUNK)


def test_damage_to_chunks_that_the_engine_has_itself_harms_no_load(bed: Bed, client: RawClient) -> None:
    stored_and_damaged(bed, client, 1)
    client.lookup(DOCUMENT, "second")
    client.ask("free", key(DOCUMENT, "second", worker=None, end=2 * CHUNK), 1)

    assert client.retrieve(DOCUMENT, "second", start=2 * CHUNK)


def test_a_damaged_chunk_is_loaded_from_disk(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, store=MemoryStore(1 << 20)) as bed:
        client = RawClient(bed)
        client.register()
        stored_and_damaged(bed, client, 2, 5)
        assert client.lookup(DOCUMENT, "second") == 6

        assert client.retrieve(DOCUMENT, "second")

        assert bed.endpoint.statistics().promised.num_corrupt == 2
        client.ask("end_session", "second")
        assert bed.num_leases() == 0
        assert client.lookup(DOCUMENT, "third") == 6
        assert client.retrieve(DOCUMENT, "third")


def num_read_to_verify(bed: Bed) -> int:
    bed.endpoint.check()
    return bed.transfers.statistics()[Route.HOST_TO_DEVICE].num_bytes // CHUNK_BYTES


def test_what_a_promise_holds_is_read_once_a_second_for_all(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    assert client.lookup(DOCUMENT, "a") == 6
    assert client.lookup(DOCUMENT, "b") == 6
    assert num_read_to_verify(bed) == 6

    bed.pass_time(1.1)
    assert client.lookup(DOCUMENT, "c") == 6
    assert num_read_to_verify(bed) == 12

    for request in "abc":
        client.ask("end_session", request)
    assert client.lookup(DOCUMENT, "d") == 6
    assert num_read_to_verify(bed) == 18


def test_what_is_being_verified_for_another_request_is_waited_for(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    bed.settle()
    bed.lanes["host_to_device"].is_stopped = True
    for request in "ab":
        assert client.lookup(DOCUMENT, request) == 6
    client.ask("end_session", "a")
    uid = client.send("prepare_retrieve", key(DOCUMENT, "b"), 1)
    bed.until(lambda: bed.endpoint.is_waiting or None)

    bed.lanes["host_to_device"].is_stopped = False

    assert client.receive()[0] == uid
    client.ask("commit_retrieve", key(DOCUMENT, "b"), 1)
    assert num_read_to_verify(bed) == 6
    assert bed.num_leases() == 0


def on_disk_only(bed: Bed, client: RawClient) -> None:
    """Have the document on disk, and not in host memory."""
    client.register()
    for number, tokens in enumerate((DOCUMENT, [1] * 8 * CHUNK, [2] * 8 * CHUNK, [3] * 8 * CHUNK)):
        client.store(tokens, f"stored {number}")
        bed.settle()


def test_nothing_behind_a_chunk_that_could_not_be_read_is_verified(tmp_path: Path) -> None:
    store = MemoryStore(1 << 20)
    with lmcache_bed(tmp_path, num_extents=1, store=store) as bed:  # sixteen slots
        client = RawClient(bed)
        on_disk_only(bed, client)
        (third,) = [stored for stored, row in store.rows.items() if row.payload == content(DOCUMENT, 2)]
        store.delete([third])

        assert client.lookup(DOCUMENT, "second") == 2

        assert num_read_to_verify(bed) == 2
        assert client.retrieve(DOCUMENT, "second", end=2 * CHUNK)


def test_a_chunk_that_is_let_go_as_it_comes_is_not_verified(tmp_path: Path) -> None:
    with lmcache_bed(tmp_path, num_extents=1, store=MemoryStore(1 << 20)) as bed:
        client = RawClient(bed)
        on_disk_only(bed, client)
        bed.lanes[Route.DISK_TO_HOST].is_stopped = True
        client.ask("lookup", key(DOCUMENT, "second", worker=None), 1)
        bed.settle()
        bed.lanes[Route.DISK_TO_HOST].is_stopped = False
        bed.lanes[Route.DISK_TO_HOST].work()
        bed.transfers.poll()
        bed.layouts.poll()  # the chunks are there, and the endpoint has no turn to have them verified
        assert bed.num_leases() == 6

        client.send("free", key(DOCUMENT, "second", worker=None, end=2 * CHUNK), 1)

        def is_let_go() -> bool:
            bed.endpoint.receive()
            return bed.num_leases() == 4

        wait_for(is_let_go)
        assert client.ask("status", "second") == 6
        bed.settle()

        assert num_read_to_verify(bed) == 4
        assert bed.endpoint.statistics().promised.num_corrupt == 0
        client.ask("end_session", "second")
        assert bed.num_leases() == 0


def test_damage_is_told_to_all_that_wait_and_seen_while_a_promise_stands(bed: Bed, client: RawClient) -> None:
    slots = stored_and_damaged(bed, client)
    assert client.lookup(DOCUMENT, "before") == 6
    bed.pass_time(1.1)
    bed.bytes_of(slots[2])[0] ^= 1

    bed.lanes["host_to_device"].is_stopped = True
    for request in "ab":
        assert client.lookup(DOCUMENT, request) == 6
    sent = [client.send("prepare_retrieve", key(DOCUMENT, request), 1) for request in "ab"]
    bed.settle()
    bed.lanes["host_to_device"].is_stopped = False

    answers = dict(client.receive()[::2] for _ in "ab")
    assert [answers[uid]["success"] for uid in sent] == [False, False]
    assert bed.endpoint.statistics().promised.num_corrupt == 2
    bed.endpoint.check()


def test_who_asks_for_little_does_not_wait_for_all_of_who_asks_for_much(bed: Bed) -> None:
    memory = bed.layouts.open(layout("m")).memories[0]
    lane = DigestLane(bed.transfers, Route.HOST_TO_DEVICE)
    told: list[str] = []
    lane.take("who asks for much", memory, range(20 * BATCH_CHUNKS), lambda part, digests: told.append("much"))
    lane.take("who asks for little", memory, [3], lambda part, digests: told.append("little"))

    while len(told) < 21:
        bed.lanes["host_to_device"].work()
        bed.transfers.poll()
        lane.pump()

    assert told.index("little") <= MAX_IN_FLIGHT + 1


def test_a_chunk_stored_anew_is_not_forgotten_for_the_damage_of_the_old_one(bed: Bed, client: RawClient) -> None:
    stored_and_damaged(bed, client, 0)
    lane = bed.lanes["host_to_device"]
    lane.is_stopped = True
    assert client.lookup(DOCUMENT, "a") == 6
    bed.pass_time(1.1)  # so that the other request's chunks are read again
    other = RawClient(bed)
    other.register(instance_id=2)
    assert other.lookup(DOCUMENT, "b") == 6
    uid = other.send("prepare_retrieve", key(DOCUMENT, "b"), 2)
    bed.until(lambda: bed.endpoint.is_waiting or None)
    bed.settle()
    lane.waiting, later = lane.waiting[:1], lane.waiting[1:]
    assert later
    lane.is_stopped = False
    bed.turn()
    lane.is_stopped = True
    assert client.store(DOCUMENT, "again") == [0]
    bed.settle()
    lane.waiting += later
    lane.is_stopped = False
    answered, _, answer = other.receive()
    assert (answered, answer["success"]) == (uid, True)  # of the chunk that was stored anew

    assert client.lookup(DOCUMENT, "c") == 6
    assert bed.endpoint.statistics().promised.num_corrupt == 2


def test_without_a_registration_there_are_no_hits(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")

    assert client.lookup(DOCUMENT, "second", model_name="other") == 0
    assert client.lookup(DOCUMENT, "second", world_size=2) == 0
    client.ask("unregister", 1)
    assert client.lookup(DOCUMENT, "second") == 0
    client.register()
    assert client.lookup(DOCUMENT, "second") == 6


def test_engines_of_one_model_with_two_layouts_have_no_hits(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    other = RawClient(bed)
    other.register(instance_id=2, dtype_str="float16")
    assert client.lookup(DOCUMENT, "second") == 0
    assert bed.refusals.counts["two_layouts"] == 1

    other.close()

    assert client.lookup(DOCUMENT, "second") == 6


def test_a_layout_never_finds_the_chunks_of_another(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    client.ask("unregister", 1)

    client.register(dtype_str="float16")

    assert client.lookup(DOCUMENT, "second") == 0
    assert client.store(DOCUMENT, "second") == [0, 1, 2, 3, 4, 5]


def test_a_layout_that_has_no_place_is_refused_and_lives_on(bed: Bed, client: RawClient) -> None:
    for instance, changed in ((2, {"dtype_str": "float64"}), (3, {"num_layers": 1 << 20}), (4, {"num_layers": "x"})):
        # Without a segment the client would send every chunk by value.
        assert client.register(instance_id=instance, **changed)["pool_size"] == bed.segment.num_bytes

        assert client.ask("prepare_store", key(DOCUMENT, "r"), instance)["context"]["slots"] == []
        assert client.ask("commit_store", key(DOCUMENT, "r"), instance, b"") is False
        assert client.prepare_retrieve(DOCUMENT, "r", instance)["success"] is False

    assert bed.refusals.counts == {"layout": 2, "payload": 1}


def test_a_restarted_sidecar_makes_workers_register_again(bed: Bed) -> None:
    client = RawClient(bed)
    assert client.ask("ping", None) is True

    assert [client.ask("ping", 5) for _ in range(3)] == [False, True, True]

    client.register(instance_id=5)
    assert client.ask("ping", 5) is True
    client.ask("unregister", 5)
    assert [client.ask("ping", 5) for _ in range(2)] == [False, True]


def test_messages_from_before_a_restart_do_no_harm(bed: Bed) -> None:
    client = RawClient(bed)

    assert client.ask("commit_store", key(DOCUMENT, "r"), 1, b"") is False
    assert client.ask("prepare_store", key(DOCUMENT, "r"), 1)["context"]["slots"] == []
    assert client.ask("prepare_retrieve", key(DOCUMENT, "r"), 1)["success"] is False
    assert client.ask("commit_retrieve", key(DOCUMENT, "r"), 1) is True
    assert client.ask("status", "r") == 0
    client.register()
    assert client.ask("commit_store", key(DOCUMENT, "r"), 1, b"") is False


def test_pickled_chunks_are_never_read(bed: Bed, client: RawClient) -> None:
    client.ask("prepare_store", key(DOCUMENT, "r"), 1)

    assert client.ask("commit_store", key(DOCUMENT, "r"), 1, b"\x80\x04N.") is False

    assert client.lookup(DOCUMENT, "second") == 0
    assert bed.refusals.counts["pickle"] == 1


def test_a_client_that_does_not_say_how_many_read_has_no_hits(
    bed: Bed, client: RawClient, caplog: pytest.LogCaptureFixture
) -> None:
    client.store(DOCUMENT, "first")
    old = key(DOCUMENT, "second", worker=None)
    del old["num_kv_readers"]

    for _ in range(3):
        assert client.ask("lookup", old, 1) is None
        assert client.ask("status", "second") == 0

    assert [record.getMessage() for record in caplog.records] == [
        "lmcache: a client that does not send num_kv_readers gets no hits; install lmcache>=0.5.5,<0.5.8 in the "
        "engine's environment"
    ]


@pytest.mark.parametrize("op", [11, 18])
def test_an_old_client_is_known_by_how_it_asks_for_the_chunk_size(
    bed: Bed, op: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert RawClient(bed).ask(op) is None
    assert RawClient(bed).ask(op) is None

    assert bed.refusals.counts["old_client"] == 2
    (line,) = [record.getMessage() for record in caplog.records]
    assert "install lmcache>=0.5.5,<0.5.8" in line


def test_the_size_of_chunks_is_the_sidecars_whatever_the_client_needs(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    client = RawClient(bed)
    assert client.ask("negotiate_chunk_size", CHUNK // 2) == CHUNK
    assert not caplog.records
    assert client.ask("negotiate_chunk_size", 3 * CHUNK + 1) == CHUNK  # upon which the client ends with its own error
    assert f"start the sidecar with --chunk-tokens {3 * CHUNK + 1}" in caplog.text
    assert client.ask("negotiate_chunk_size", CHUNK) == client.ask("get_chunk_size") == CHUNK


def test_a_subscription_to_events_is_told_that_there_are_none(bed: Bed) -> None:
    assert RawClient(bed).ask("subscribe_kv_events", 1, "m", 0, 1024) == {
        "enabled": False,
        "incarnation": 0,
        "next_cursor": 0,
        "lost": False,
        "events": [],
    }


def test_engines_of_both_forms_load_what_the_other_has_stored(bed: Bed) -> None:
    old, new = RawClient(bed, "0.5.6"), RawClient(bed, "0.5.7")
    old.register(instance_id=1)
    new.register(instance_id=2, group_layouts=[])
    newer = [*DOCUMENT[: 2 * CHUNK], *range(4 * CHUNK)]

    assert old.store(DOCUMENT, "a", instance=1) == [0, 1, 2, 3, 4, 5]
    assert new.store(newer, "b", instance=2) == [2, 3, 4, 5]

    assert new.lookup(DOCUMENT, "c") == 6
    assert new.retrieve(DOCUMENT, "c", instance=2)
    assert old.lookup(newer, "d") == 6
    assert old.retrieve(newer, "d", instance=1)


@pytest.mark.parametrize("changed", [{"token_bytes": b"abc"}, {"token_bytes": None}, {"token_bytes": "text"}, {}])
def test_a_key_has_its_tokens_in_one_form(bed: Bed, client: RawClient, changed: dict[str, object]) -> None:
    own = key(DOCUMENT, "r", worker=None, **(changed or {"token_bytes": bytes(4 * CHUNK)}))
    if changed:
        del own["token_ids"]

    assert RawClient(bed, "0.5.6").ask("lookup", own, 1) is None

    assert bed.refusals.counts == {"payload": 1}


def test_chunks_of_abandoned_lookups_are_not_those_of_the_current_one(bed: Bed) -> None:
    client = RawClient(bed, "0.5.7")
    client.register()
    client.store(DOCUMENT, "first")
    client.lookup(DOCUMENT, "second")
    client.lookup(DOCUMENT, "second")  # the engine's own hit has shrunk: the first result is dropped

    own = key(DOCUMENT, "second", worker=None, start=0, end=2 * CHUNK)
    assert client.ask("free", own, 1, [[0, 6 * CHUNK], [2 * CHUNK, 6 * CHUNK]]) is None

    assert bed.num_leases() == 4
    bed.lanes["host_to_device"].is_stopped = True  # what is not promised any more would wait for its digest
    assert client.retrieve(DOCUMENT, "second", start=2 * CHUNK)
    assert bed.num_leases() == 0
    assert bed.refusals.counts == {}


def test_an_engine_in_the_other_mode_is_told_what_to_set(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    assert RawClient(bed).ask(1, 1, b"", "m", 1) is None

    assert '{"lmcache.mp.mp_transfer_mode": "engine_driven"}' in caplog.text


def test_a_salt_that_no_client_of_lmcache_sends_is_refused(bed: Bed, client: RawClient) -> None:
    for salt in ("a@b", "a/b", "a\\b", "a\0b", "s" * 129):
        assert client.lookup(DOCUMENT, "r", cache_salt=salt) == 0
        assert client.ask("prepare_store", key(DOCUMENT, "r", cache_salt=salt), 1)["context"]["slots"] == []

    assert bed.refusals.counts["salt"] + bed.refusals.counts["payload"] == 10


def test_token_ids_of_more_than_32_bits_are_refused(bed: Bed, client: RawClient) -> None:
    client = RawClient(bed, "0.5.6")  # the other form has no such ids
    for token in (1 << 32, -1, 1 << 63):
        assert client.lookup([*DOCUMENT, token], "r") == 0

    assert bed.refusals.counts["token_ids"] == 3


@pytest.mark.parametrize("forced", [(), (True,)], ids=["0.5.5", "newer"])
def test_what_was_committed_before_everything_was_cleared_is_not_found(
    bed: Bed, client: RawClient, forced: tuple[bool, ...]
) -> None:
    client.store(DOCUMENT, "first")
    bed.lanes["device_to_host"].is_stopped = True
    client.store([5] * 20, "second")
    client.ask("prepare_store", key([6] * 20, "third"), 1)

    assert client.ask("clear", *forced) is None

    bed.lanes["device_to_host"].is_stopped = False
    bed.settle()
    assert client.ask("commit_store", key([6] * 20, "third"), 1, b"") is True
    for tokens in (DOCUMENT, [5] * 20, [6] * 20):
        assert client.lookup(tokens, "later") == 0
    client.ask("end_session", "later")
    assert bed.num_leases() == 0
    assert client.store(DOCUMENT, "after") == [0, 1, 2, 3, 4, 5]
    assert client.lookup(DOCUMENT, "later") == 6


def test_what_was_promised_before_everything_was_cleared_is_loaded(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    assert client.lookup(DOCUMENT, "second") == 6
    other = RawClient(bed)
    other.ask("clear", True)
    other.register(instance_id=2)
    other.store(list(range(90 * CHUNK)), "much")

    assert client.retrieve(DOCUMENT, "second")
    assert client.lookup(DOCUMENT, "third") == 0


def test_every_operation_is_answered_whatever_it_carries(bed: Bed, client: RawClient) -> None:
    harmless = {
        "status": 0,
        "wait_status": 0,
        "register": {"shm_name": f"/{bed.segment.name}", "pool_size": bed.segment.num_bytes},
        "prepare_store": {"context": {"slots": [], "chunk_indices": [], "group_ids": []}},
        "commit_store": False,
        "prepare_retrieve": {"success": False, "data": b"", "context": {}},
        "commit_retrieve": True,
        "ping": True,
        "noop": "OK",
        "get_experimental": [],
    }
    for op in OPS:
        for payload in [("x",) * 5, ({},), (1 << 64 - 1, 2), (None, None), (key(DOCUMENT, "r", start=3), 1)]:
            if op in ("report", "ping", "free") or (op, payload) == ("status", ("x",)):
                continue
            assert client.ask(op, *payload) == harmless.get(op), (op, payload)
    assert client.ask("negotiate_chunk_size", 0) is None  # no size would do
    assert client.ask("server_module_call", "m", b"")["success"] is False
    assert client.ask("server_module_affinity_call", "m", b"")["success"] is False
    for op in [2, 3, 5, 25, 31, 33, 99, -1, "cb_reorder_plan", "x" * 10_000]:
        assert client.ask(op, 1, "x") is None
    assert client.ask("report", 1, "m", [{"req_id": "r"}]) is None
    assert client.ask("get_chunk_size") == CHUNK
    assert client.ask("noop") == "OK"
    assert client.ask("get_experimental") == []
    assert client.lookup(DOCUMENT, "r") == 0


def test_unknown_fields_are_no_reason_to_refuse(client: RawClient) -> None:
    assert client.ask("register", {**REGISTRATION, "instance_id": 4, "new_field": [1]})["pool_size"] > 0
    without = {name: value for name, value in REGISTRATION.items() if name != "num_physical_slots"}
    assert client.ask("register", {**without, "instance_id": 5})["pool_size"] > 0

    client.store(DOCUMENT, "r", new_field={"a": 1})
    assert client.lookup(DOCUMENT, "r", another="x") == 6
