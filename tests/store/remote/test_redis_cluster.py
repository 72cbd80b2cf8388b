"""A cluster whose nodes hang, die and hand slots over while it is asked: no call fails otherwise or ends late, and what
can be had is had."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from redis.crc import key_slot
from redis_servers import ClusterOfSix, RedisServer
from remote_cases import needs_redis, read_blocks, redis_name
from remote_load import RemoteLoad
from store_cases import NAMESPACE, blob_of, key_of
from waiting import is_in, join, wait_for

from kvtier.store.record import Fault
from kvtier.store.remote.redis.cluster import RedisCluster
from kvtier.store.remote.redis_remote import RedisRemote
from kvtier.store.remote.sealed_remote import SealedRemote
from kvtier.store.remote_store import RemoteUnavailable

pytestmark = [needs_redis, pytest.mark.long]

NUMBERS = range(60)  # of blocks, on all nodes
TIMEOUT_S = 2.0  # of the client: longer than a busy machine keeps a server from answering
LATE_S = 20.0  # when a call must have ended in any case
BLOBS = [blob_of(number) for number in NUMBERS]
GOOD = [blob.digest for blob in BLOBS]
BACK_WITHIN_S = 5.0


def read(store: RedisRemote) -> list[bytes | Fault]:
    return read_blocks(store, *NUMBERS)


def put(store: RedisRemote) -> list[bool]:
    return SealedRemote(store).put_many(BLOBS)


@pytest.fixture
def store(cluster: ClusterOfSix) -> Iterator[RedisRemote]:
    with RedisRemote(cluster.settings(timeout_s=TIMEOUT_S)) as opened:
        assert all(put(opened))
        yield opened


@pytest.fixture
def patient(cluster: ClusterOfSix) -> Iterator[RedisRemote]:
    """A client that finds no node silent just because the machine is busy."""
    with RedisRemote(cluster.settings()) as opened:
        assert all(put(opened))
        yield opened


def owners(cluster: ClusterOfSix) -> list[RedisServer]:
    """The node of each block."""
    by_slot = {slot: node for node in cluster.primaries() for slot in node.own_slots()}
    return [by_slot[key_slot(redis_name(key_of(number)))] for number in NUMBERS]


@contextmanager
def paused(node: RedisServer) -> Iterator[None]:
    node.pause()
    try:
        yield
    finally:
        node.resume()


def test_keys_of_the_other_nodes_are_served_beside_one_that_hangs(cluster: ClusterOfSix, store: RedisRemote) -> None:
    cluster.require_all_slots(False)
    nodes = owners(cluster)
    hanging = nodes[0]
    with paused(cluster.replica_of(hanging)), paused(hanging):
        began = time.monotonic()
        results, are_there, were_put = read(store), store.exist_many([key_of(number) for number in NUMBERS]), put(store)

        assert time.monotonic() - began < LATE_S
        assert results == [Fault.IO_ERROR if node is hanging else good for node, good in zip(nodes, GOOD, strict=True)]
        assert are_there == [None if node is hanging else True for node in nodes]
        assert were_put == [node is not hanging for node in nodes]

    wait_for(lambda: read(store) == GOOD)


def test_a_node_that_hangs_costs_one_wait_and_no_more(cluster: ClusterOfSix, store: RedisRemote) -> None:
    cluster.require_all_slots(False)
    hanging = owners(cluster)[0]
    with paused(cluster.replica_of(hanging)), paused(hanging):
        read(store)

        began = time.monotonic()
        for _ in range(20):
            read(store)
        assert time.monotonic() - began < 5 * TIMEOUT_S


@pytest.mark.parametrize("others_stop", [True, False], ids=["others stop", "others serve"])
def test_under_load_a_primary_fails_over(cluster: ClusterOfSix, store: RedisRemote, others_stop: bool) -> None:
    cluster.require_all_slots(others_stop)
    dying = owners(cluster)[0]
    replica = cluster.replica_of(dying)
    with RemoteLoad(store, BLOBS) as load:
        dying.kill()
        wait_for(lambda: replica.told("INFO replication", "role") == "master", 0.02)
        back_after_s = load.back_after_s()

    assert not load.wrong
    assert load.longest_s < LATE_S
    assert back_after_s < BACK_WITHIN_S


def test_under_load_a_primary_hangs_and_another_takes_its_place(cluster: ClusterOfSix, store: RedisRemote) -> None:
    hanging = owners(cluster)[0]
    replica = cluster.replica_of(hanging)
    with RemoteLoad(store, BLOBS) as load, paused(hanging):
        wait_for(lambda: replica.told("INFO replication", "role") == "master", 0.02)
        back_after_s = load.back_after_s()

    assert not load.wrong
    assert load.longest_s < LATE_S
    assert back_after_s < BACK_WITHIN_S


def test_under_load_slots_move_and_every_block_stays_readable(cluster: ClusterOfSix, patient: RedisRemote) -> None:
    first, second, third = cluster.primaries()
    slots = sorted({key_slot(redis_name(key_of(number))) for number in NUMBERS} & first.own_slots())[:3]
    with RemoteLoad(patient, BLOBS) as load:
        for to in (second, third, first):
            for slot in slots:
                cluster.move_slot(slot, to)

    assert not load.wrong
    assert not load.num_incomplete
    assert not load.num_unavailable


def test_a_slot_of_which_half_has_moved_is_found_in_both_places(cluster: ClusterOfSix, patient: RedisRemote) -> None:
    source = owners(cluster)[0]
    target = next(node for node in cluster.primaries() if node is not source)
    slot = key_slot(redis_name(key_of(0)))
    cluster.begin_to_move(slot, source, target)
    try:
        assert read(patient) == GOOD  # it is still there
        source.ask("MIGRATE", target.address.host, target.port, redis_name(key_of(0)), 0, 30_000)

        assert read(patient) == GOOD
        assert all(patient.exist_many([key_of(number) for number in NUMBERS]))
        assert all(put(patient))
        assert read(patient) == GOOD
    finally:
        cluster.move_slot(slot, target)
        cluster.move_slot(slot, source)
    assert read(patient) == GOOD


def test_large_records_are_on_one_node_with_all_their_parts(cluster: ClusterOfSix, store: RedisRemote) -> None:
    num_bytes = 9 << 20
    sealed, blobs = SealedRemote(store), [blob_of(number, num_bytes) for number in range(4)]
    outs = [memoryview(bytearray(num_bytes)) for _ in blobs]

    assert all(sealed.put_many(blobs))

    assert sealed.read_many([blob.key for blob in blobs], outs) == [blob.digest for blob in blobs]
    store.forget(NAMESPACE)
    assert sum(node.ask("DBSIZE") for node in cluster.primaries()) == 0


def test_a_cluster_that_is_all_away_is_told_and_found_again(cluster: ClusterOfSix, store: RedisRemote) -> None:
    for node in cluster.nodes:
        node.kill()
    for call in (lambda: read(store), lambda: put(store), lambda: store.forget(NAMESPACE)):
        with pytest.raises(RemoteUnavailable):
            call()

    cluster.heal()

    wait_for(lambda: _all_put(store))
    assert read(store) == GOOD


def _all_put(store: RedisRemote) -> bool:
    try:
        return all(put(store))
    except RemoteUnavailable:
        return False


def test_a_client_that_knows_one_node_finds_the_others(cluster: ClusterOfSix, store: RedisRemote) -> None:
    for node in cluster.nodes:
        with RedisRemote(replace(cluster.settings(), addresses=(node.address,))) as other:
            assert read(other) == GOOD


def test_a_cluster_written_as_a_server_says_how_to_write_it(cluster: ClusterOfSix, store: RedisRemote) -> None:
    elsewhere = [number for number, node in zip(NUMBERS, owners(cluster), strict=True) if node is not cluster.nodes[0]]
    with (
        RedisRemote(cluster.nodes[0].settings()) as one,
        pytest.raises(RemoteUnavailable, match="of a cluster; write"),
    ):
        one.get_many([key_of(number) for number in elsewhere])


def test_closing_ends_threads_and_connections(cluster: ClusterOfSix) -> None:
    before = threading.active_count()
    store = RedisRemote(cluster.settings())
    put(store)

    store.close()

    wait_for(lambda: threading.active_count() <= before)


def test_closing_ends_calls_that_wait_for_a_node(cluster: ClusterOfSix) -> None:
    hanging = owners(cluster)[0]
    store = RedisRemote(cluster.settings(timeout_s=60))
    put(store)
    told: list[object] = []

    def wait_for_it() -> None:
        try:
            told.append(read(store))
        except RemoteUnavailable as unavailable:
            told.append(str(unavailable))

    with paused(cluster.replica_of(hanging)), paused(hanging):
        waiting = threading.Thread(target=wait_for_it)
        waiting.start()
        wait_for(lambda: waiting.ident is not None and is_in(waiting.ident, RedisCluster.ask))

        store.close()

        join(waiting)
    with pytest.raises(RemoteUnavailable, match="closed"):
        read(store)
    assert len(told) == 1
