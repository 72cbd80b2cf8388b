"""What a worker copies out of the segment, or into it, is given to nothing else until it has copied it or is gone.

LMCache's worker tells neither that it goes on with a copy nor that it has given one up: it may be stopped (SIGSTOP) in
the middle of one for hours, while other threads of its process or nobody speak for it.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from chaos import FakeClock
from layout_bed import layout
from lmcache_bed import CHUNK, REGISTRATION, Bed, RawClient, content, key
from plain_connection import Plain

from kvtier.sidecar.endpoint import LeaseUse
from kvtier.sidecar.lmcache.digest_lane import DigestLane
from kvtier.sidecar.lmcache.registrations import Instance
from kvtier.sidecar.lmcache.stores import Stores
from kvtier.sidecar.lmcache.zmtp import message_bytes
from kvtier.sidecar.port import Client
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.transfer.transfer_engine import Route

DOCUMENT = list(range(1000, 1000 + 6 * CHUNK + 3))


def ping_for_an_hour(bed: Bed, client: RawClient) -> None:
    for _ in range(360):
        client.ask("ping", 1)
        bed.clock.now += 10
    bed.settle()


EVENTS: dict[str, Callable[[Bed, RawClient], Any]] = {
    "says nothing for an hour": lambda bed, client: bed.pass_time(3600),
    "has a thread that pings for an hour": ping_for_an_hour,
    "unregisters": lambda bed, client: client.ask("unregister", 1),
    "registers anew": lambda bed, client: client.register(),
    "registers another layout": lambda bed, client: client.register(dtype_str="float16"),
    "registers what is refused": lambda bed, client: client.register(dtype_str="float64"),
    "unregisters and registers": lambda bed, client: (client.ask("unregister", 1), client.register()),
    "ends the request": lambda bed, client: client.ask("end_session", "r"),
    "clears everything": lambda bed, client: client.ask("clear", True),
}


def fill(bed: Bed) -> list[int]:
    """Have another engine write to all slots that it can get, three times over; where those are."""
    other = RawClient(bed)
    other.register(instance_id=2)
    offsets = []
    for number in range(30):
        tokens = [number] * 16 * CHUNK
        context = other.ask("prepare_store", key(tokens, f"f{number}"), 2)["context"]
        for slot in context["slots"]:
            offsets.append(slot["offset"])
            bed.bytes_of(slot)[:] = bytes([255]) * slot["length"]
        other.ask("commit_store", key(tokens, f"f{number}"), 2, b"")
        bed.settle()
    assert len(offsets) > 3 * 6
    other.close()
    return offsets


@pytest.mark.parametrize("event", EVENTS)
def test_slots_that_a_worker_writes_to_are_given_to_nothing_else(bed: Bed, client: RawClient, event: str) -> None:
    slots = client.ask("prepare_store", key(DOCUMENT, "r"), 1)["context"]["slots"]

    EVENTS[event](bed, client)

    assert not {slot["offset"] for slot in slots} & set(fill(bed))
    assert bed.num_leases() == 6
    client.close()
    bed.settle()
    assert bed.num_leases() == 0


@pytest.mark.parametrize("event", EVENTS)
def test_slots_that_a_worker_reads_are_given_to_nothing_else(bed: Bed, client: RawClient, event: str) -> None:
    client.store(DOCUMENT, "first")
    client.lookup(DOCUMENT, "r")
    slots = client.prepare_retrieve(DOCUMENT, "r")["context"]["slots"]

    EVENTS[event](bed, client)

    assert not {slot["offset"] for slot in slots} & set(fill(bed))
    assert [bytes(bed.bytes_of(slot)) for slot in slots] == [content(DOCUMENT, chunk) for chunk in range(6)]
    client.close()
    bed.settle()
    assert bed.num_leases() == 0


def test_a_worker_that_unregisters_is_named_with_what_it_may_still_copy(bed: Bed, client: RawClient) -> None:
    client.ask("prepare_store", key(DOCUMENT, "r"), 1)

    client.ask("unregister", 1)

    (held,) = bed.layouts.quarantine.clients()
    assert (held.name, [(lease.use, lease.num_chunks) for lease in held.leases]) == (
        "worker 1",
        [(LeaseUse.QUARANTINED, 6)],
    )
    client.close()
    bed.settle()
    assert bed.layouts.quarantine.clients() == []


def test_a_store_is_committed_by_a_worker_that_has_registered_anew_meanwhile(bed: Bed, client: RawClient) -> None:
    slots = client.ask("prepare_store", key(DOCUMENT, "r"), 1)["context"]["slots"]
    client.register()
    for chunk, slot in enumerate(slots):
        bed.bytes_of(slot)[:] = content(DOCUMENT, chunk)

    assert client.ask("commit_store", key(DOCUMENT, "r"), 1, b"") is True

    assert client.lookup(DOCUMENT, "s") == 6
    assert client.retrieve(DOCUMENT, "s")
    assert bed.num_leases() == 0


def test_the_commit_of_one_store_is_never_taken_for_that_of_another(bed: Bed, client: RawClient) -> None:
    slots = client.ask("prepare_store", key(DOCUMENT, "r"), 1)["context"]["slots"]
    assert client.ask("prepare_store", key(DOCUMENT, "r"), 1)["context"]["slots"] == []  # another thread's
    for chunk, slot in enumerate(slots):
        bed.bytes_of(slot)[:] = content(DOCUMENT, chunk)

    assert client.ask("commit_store", key(DOCUMENT, "r"), 1, b"") is True
    assert client.ask("commit_store", key(DOCUMENT, "r"), 1, b"") is False

    assert client.lookup(DOCUMENT, "s") == 6
    assert client.retrieve(DOCUMENT, "s")


@pytest.mark.parametrize(
    ("changed", "instance"),
    [({"request": "s"}, 1), ({"end": 3 * CHUNK}, 1), ({"worker": 1}, 1), ({}, 2)],
    ids=["request", "chunks", "rank", "worker"],
)
def test_the_commit_of_something_else_ends_no_store(bed: Bed, changed: dict[str, Any], instance: int) -> None:
    client, other = RawClient(bed), RawClient(bed)
    client.register(world_size=2)
    other.register(instance_id=2, world_size=2)
    own = {"request": "r", "world_size": 2}
    workers = {1: client, 2: other}
    assert len(client.ask("prepare_store", key(DOCUMENT, **own), 1)["context"]["slots"]) == 6

    wrong = workers[instance].ask("commit_store", key(DOCUMENT, **{**own, **changed}), instance, b"")
    bed.settle()

    assert wrong is False
    assert bed.num_leases() == 6, "it is still being written"
    assert client.ask("commit_store", key(DOCUMENT, **own), 1, b"") is True


def test_what_is_written_while_another_layout_is_cleared_is_found(bed: Bed, client: RawClient) -> None:
    own = key(DOCUMENT, "r")
    context = client.ask("prepare_store", own, 1)["context"]

    bed.endpoint.on_clear([layout("another model")])

    client.write(context, own)
    assert client.ask("commit_store", own, 1, b"") is True
    assert client.lookup(DOCUMENT, "s") == 6


def reserved_by_hand(bed: Bed) -> tuple[Stores, Instance, list[BlockName]]:
    """A worker's reservation of three chunks of the request "r"."""
    client = FakeClock()  # anything that is equal to itself alone
    instance = Instance(1, client, layout("m"), bed.layouts.open(layout("m")))  # type: ignore[arg-type]
    stores = Stores(DigestLane(bed.transfers, Route.HOST_TO_DEVICE), bed.layouts.shares, bed.clock)
    names = [BlockName(bytes([number]) * 32) for number in range(3)]
    assert stores.reserve(instance, 0, "r", range(3), NamedBlocks(names, [None, *names[:2]], b""))
    return stores, instance, names


def test_slots_of_a_worker_that_has_gone_are_given_up_once(bed: Bed) -> None:
    stores, instance, _ = reserved_by_hand(bed)

    for _ in range(2):
        stores.end_instance(instance)

    assert stores.counts.num_given_up == 3
    assert list(stores) == []
    assert not stores.is_written_by(instance.client)
    assert bed.num_leases() == 0


def test_chunks_whose_digests_cannot_be_taken_are_not_found(bed: Bed) -> None:
    stores, instance, names = reserved_by_hand(bed)
    bed.lanes[Route.HOST_TO_DEVICE].is_stopped = True
    assert stores.commit(instance, 0, "r", range(3))
    (store,) = stores

    stores.on_digests(store, range(3), None)

    assert not instance.tiers.tiers.find_run(0, names).size
    assert stores.counts.num_given_up == 3
    assert bed.num_leases() == 0
    assert not any(stores.is_coming(instance.tiers, 0, name) for name in names)


def test_each_of_two_loads_of_the_same_chunks_has_its_own_end(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    for _ in range(2):
        assert client.prepare_retrieve(DOCUMENT, "r")["success"] is True

    client.ask("commit_retrieve", key(DOCUMENT, "r"), 1)
    assert bed.num_leases() == 6

    client.ask("commit_retrieve", key(DOCUMENT, "r"), 1)
    assert bed.num_leases() == 0
    assert bed.endpoint.statistics().promised.num_loaded == 12


def test_the_word_for_some_chunks_ends_no_load_of_others(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    client.lookup(DOCUMENT, "r")
    parts = [{"end": 2 * CHUNK}, {"start": 2 * CHUNK}]
    for part in parts:
        assert client.prepare_retrieve(DOCUMENT, "r", **part)["success"] is True

    client.ask("commit_retrieve", key(DOCUMENT, "r", **parts[1]), 1)
    assert bed.num_leases() == 2, "the other part may still be copied"

    client.ask("commit_retrieve", key(DOCUMENT, "r", **parts[0]), 1)
    assert bed.num_leases() == 0


def test_of_two_loads_of_the_same_chunks_the_older_one_ends_first(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    begun_at = []
    for _ in range(2):
        bed.pass_time(1.0)
        client.lookup(DOCUMENT, "r")  # each load is of another promise
        begun_at.append(bed.clock())
        assert client.prepare_retrieve(DOCUMENT, "r")["success"] is True

    client.ask("commit_retrieve", key(DOCUMENT, "r"), 1)

    leases = [lease for each in bed.endpoint.clients() for lease in each.leases if lease.use == LeaseUse.READ]
    assert [lease.since for lease in leases] == begun_at[1:]
    client.ask("commit_retrieve", key(DOCUMENT, "r"), 1)


def test_a_worker_that_loads_twice_is_one_of_those_that_load(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    other = RawClient(bed)
    other.register(instance_id=2)
    client.lookup(DOCUMENT, "r", num_kv_readers=2)

    for _ in range(2):
        assert client.retrieve(DOCUMENT, "r", num_kv_readers=2)

    assert bed.num_leases() == 6
    assert other.retrieve(DOCUMENT, "r", instance=2, num_kv_readers=2)
    assert bed.num_leases() == 0


def test_a_load_ends_with_the_word_of_the_worker_that_loads(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    other = RawClient(bed)
    other.register(instance_id=2)
    for worker, instance in ((client, 1), (other, 2)):
        assert worker.prepare_retrieve(DOCUMENT, "r", instance)["success"] is True

    other.ask("commit_retrieve", key(DOCUMENT, "r"), 2)
    other.ask("commit_retrieve", key(DOCUMENT, "r"), 2)

    assert bed.num_leases() == 6
    client.ask("commit_retrieve", key(DOCUMENT, "r"), 1)
    assert bed.num_leases() == 0


def test_the_death_of_one_worker_ends_no_load_of_another(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    other = RawClient(bed)
    other.register(instance_id=2)
    slots = client.prepare_retrieve(DOCUMENT, "one")["context"]["slots"]
    other.prepare_retrieve(DOCUMENT[: 2 * CHUNK], "other", instance=2)
    client.ask("clear", True)
    client.ask("end_session", "one")
    assert bed.num_leases() == 8

    other.close()

    assert bed.num_leases() == 6
    assert not {slot["offset"] for slot in slots} & set(fill(bed))


def test_a_load_that_is_over_before_it_is_answered_leaves_nothing(bed: Bed, client: RawClient) -> None:
    client.store(DOCUMENT, "first")
    bed.settle()
    bed.lanes["host_to_device"].is_stopped = True  # where chunks are verified
    uid = client.send("prepare_retrieve", key(DOCUMENT, "r"), 1)
    bed.until(lambda: bed.endpoint.is_waiting or None)

    done = client.send("commit_retrieve", key(DOCUMENT, "r"), 1)  # it has waited for mq_timeout

    answers = dict(client.receive()[::2] for _ in range(2))
    assert answers == {uid: {"success": False, "data": b"", "context": {}}, done: True}
    bed.lanes["host_to_device"].is_stopped = False
    client.ask("end_session", "r")
    bed.pass_time(61)
    assert bed.num_leases() == 0


def worker_by_hand(bed: Bed) -> tuple[Plain, Client[list[bytes]]]:
    """A worker that has slots reserved, and whose bytes are said one by one, with the sidecar's end of it."""
    plain = Plain(bed)
    asked = [(98, 14, REGISTRATION), (99, 16, key(DOCUMENT, "r"), 1)]
    plain.send(b"".join(message_bytes([*map(msgspec.msgpack.encode, each)]) for each in asked))
    bed.until(lambda: bed.num_leases() == 6 or None)
    return plain, bed.port.clients[-1]


def test_a_connection_that_the_endpoint_has_ended_keeps_its_slots_until_the_other_side_is_closed(bed: Bed) -> None:
    plain, client = worker_by_hand(bed)
    plain.send(b"\xff" * 100)
    bed.until(lambda: None if client.is_open else True)
    assert bed.refusals.counts == {"garbage": 1}

    assert bed.num_leases() == 6
    answered = plain.socket.recv(1 << 20)
    assert answered
    with pytest.raises(BlockingIOError):  # the end is not told, upon which libzmq would close its own
        plain.socket.recv(1)

    plain.socket.close()
    bed.settle()
    assert bed.num_leases() == 0
