"""What becomes of records in a Redis server: lifetimes, lack of room, names, parts."""

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from redis_servers import RedisServer
from remote_cases import needs_redis, put_blocks, read_blocks, redis_name
from store_cases import NAMESPACE, blob_of, key_of
from waiting import join

from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import NO_CODEC
from kvtier.store.record import Fault
from kvtier.store.remote.redis_remote import RedisRemote
from kvtier.store.remote.sealed_remote import SealedRemote

pytestmark = needs_redis

MIB = 1 << 20


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[RedisRemote]:
    with RedisRemote(redis_server.settings()) as opened:
        yield opened


def test_a_record_has_a_lifetime_that_a_put_renews(redis_server: RedisServer) -> None:
    name = redis_name(key_of(1))
    with RedisRemote(redis_server.settings(ttl_s=1000)) as store, redis_server.client() as client:
        put_blocks(store, 1)
        assert 990 < client.ttl(name) <= 1000
        client.expire(name, 5)

        put_blocks(store, 1)

        assert client.ttl(name) > 990


def test_all_parts_of_a_record_have_its_lifetime(redis_server: RedisServer) -> None:
    with RedisRemote(redis_server.settings(ttl_s=1000)) as store, redis_server.client() as client:
        put_blocks(store, 1, num_bytes=10 * MIB)

        lifetimes = [client.ttl(name) for name in client.scan_iter()]

        assert len(lifetimes) == 3
        assert all(990 < lifetime <= 1000 for lifetime in lifetimes)


def test_without_a_lifetime_a_record_stays(redis_server: RedisServer) -> None:
    with RedisRemote(redis_server.settings(ttl_s=None)) as store, redis_server.client() as client:
        put_blocks(store, 1)

        assert client.ttl(redis_name(key_of(1))) == -1


@contextmanager
def room_for(server: RedisServer, num_bytes: int, policy: str) -> Iterator[None]:
    """The server has room for so many bytes more."""
    with server.client() as client:
        before = client.config_get("maxmemory*")
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + num_bytes)
        try:
            yield
        finally:
            client.config_set("maxmemory", before["maxmemory"])
            client.config_set("maxmemory-policy", before["maxmemory-policy"])


def test_what_a_full_server_does_not_take_is_told_and_the_rest_stays(
    redis_server: RedisServer, store: RedisRemote
) -> None:
    with room_for(redis_server, 10 * MIB, "noeviction"):
        were_put = [
            is_put for first in range(0, 40, 4) for is_put in put_blocks(store, *range(first, first + 4), num_bytes=MIB)
        ]

        assert 4 <= sum(were_put) <= 12
        assert put_blocks(store, 40, num_bytes=3 * MIB) == [False]
        for number, was_put in enumerate(were_put):
            expected = blob_of(number, MIB).digest if was_put else Fault.MISSING
            assert read_blocks(store, number, num_bytes=MIB) == [expected]


def test_a_large_record_that_does_not_fit_is_not_half_there(redis_server: RedisServer, store: RedisRemote) -> None:
    with room_for(redis_server, 10 * MIB, "noeviction"):
        assert put_blocks(store, 1, num_bytes=40 * MIB) == [False]

        assert store.exist_many([key_of(1)]) == [False]
        assert redis_server.ask("DBSIZE") == 0


def test_a_large_record_that_is_there_stays_when_it_is_put_into_a_full_server(
    redis_server: RedisServer, store: RedisRemote
) -> None:
    put_blocks(store, 1, num_bytes=10 * MIB)
    with room_for(redis_server, 0, "noeviction"):
        assert put_blocks(store, 1, num_bytes=10 * MIB) == [False]

        assert read_blocks(store, 1, num_bytes=10 * MIB) == [blob_of(1, 10 * MIB).digest]


@pytest.mark.parametrize(("num_bytes", "num_parts"), [(4 * MIB, 1), (4 * MIB + 4098, 2), (8 * MIB, 2), (20 * MIB, 5)])
def test_a_record_has_as_few_parts_as_it_needs(
    redis_server: RedisServer, store: RedisRemote, num_bytes: int, num_parts: int
) -> None:
    sealed = SealedRemote(store, NO_CODEC, Cipher(bytes(32)))  # which makes it a little longer
    out = memoryview(bytearray(num_bytes))

    assert sealed.put_many([blob_of(1, num_bytes)]) == [True]

    assert redis_server.ask("DBSIZE") == num_parts
    assert sealed.read_many([key_of(1)], [out]) == [blob_of(1, num_bytes).digest]


def test_a_server_that_evicts_takes_everything_and_never_has_more_than_it_may(
    redis_server: RedisServer, store: RedisRemote
) -> None:
    with room_for(redis_server, 20 * MIB, "allkeys-lru"), redis_server.client() as client:
        for first in range(0, 100, 4):
            assert put_blocks(store, *range(first, first + 4), num_bytes=MIB) == [True] * 4
            assert client.dbsize() * MIB <= 20 * MIB

        assert read_blocks(store, 99, num_bytes=MIB) == [blob_of(99, MIB).digest]
        assert read_blocks(store, 0, num_bytes=MIB) == [Fault.MISSING]


def test_after_flushall_everything_is_missing_and_it_goes_on(redis_server: RedisServer, store: RedisRemote) -> None:
    put_blocks(store, 1, 2)
    redis_server.ask("FLUSHALL")

    assert read_blocks(store, 1, 2) == [Fault.MISSING] * 2

    assert put_blocks(store, 1) == [True]
    assert read_blocks(store, 1) == [blob_of(1).digest]


def test_something_else_under_a_key_is_no_block_and_a_put_takes_its_place(
    redis_server: RedisServer, store: RedisRemote
) -> None:
    with redis_server.client() as client:
        client.lpush(redis_name(key_of(1)), "a list")

    assert read_blocks(store, 1) == [Fault.CORRUPT]

    assert put_blocks(store, 1) == [True]
    assert read_blocks(store, 1) == [blob_of(1).digest]


def test_only_what_has_the_prefix_is_forgotten(redis_server: RedisServer) -> None:
    prefixes = ("a*[b]?:", "aXb?:", "ab:")
    with ExitStack() as stack:
        stores = [stack.enter_context(RedisRemote(redis_server.settings(prefix=prefix))) for prefix in prefixes]
        for store in stores:
            put_blocks(store, *range(30))
            put_blocks(store, 30, num_bytes=9 * MIB)

        stores[0].forget(NAMESPACE)

        assert redis_server.ask("DBSIZE") == 2 * 33
        assert not any(stores[0].exist_many([key_of(number) for number in range(31)]))


def test_databases_of_a_server_are_apart(redis_server: RedisServer) -> None:
    with RedisRemote(redis_server.settings(db=3)) as third, RedisRemote(redis_server.settings()) as first:
        put_blocks(third, 1)

        assert third.exist_many([key_of(1)]) == [True]
        assert first.exist_many([key_of(1)]) == [False]
        assert third.where.endswith("/3")


def test_a_record_of_which_a_part_is_away_is_missing(redis_server: RedisServer, store: RedisRemote) -> None:
    put_blocks(store, 1, num_bytes=10 * MIB)
    with redis_server.client() as client:
        parts = [name for name in client.scan_iter() if name != redis_name(key_of(1))]
        client.delete(parts[0])

    assert read_blocks(store, 1, num_bytes=10 * MIB) == [Fault.MISSING]

    put_blocks(store, 1, num_bytes=10 * MIB)
    assert read_blocks(store, 1, num_bytes=10 * MIB) == [blob_of(1, 10 * MIB).digest]


def test_a_part_that_was_changed_or_cut_is_refused(redis_server: RedisServer, store: RedisRemote) -> None:
    put_blocks(store, 1, num_bytes=10 * MIB)
    with redis_server.client() as client:
        last = max(name for name in client.scan_iter() if name != redis_name(key_of(1)))
        part = client.get(last)
        for wrong in (part[:-1], part[:-1] + b"x", b""):
            client.set(last, wrong)
            assert read_blocks(store, 1, num_bytes=10 * MIB)[0] in (Fault.TORN, Fault.CORRUPT)


def test_parts_that_another_record_has_replaced_are_deleted(redis_server: RedisServer, store: RedisRemote) -> None:
    sealed = SealedRemote(store, NO_CODEC, Cipher(bytes(32)))
    for _ in range(3):  # each time encrypted otherwise
        sealed.put_many([blob_of(1, 10 * MIB)])

    assert redis_server.ask("DBSIZE") == 3


def test_writers_of_one_large_record_never_mix_their_parts(store: RedisRemote) -> None:
    num_bytes = 10 * MIB
    sealed = SealedRemote(store, NO_CODEC, Cipher(bytes(32)))  # each writer's bytes are others
    blob = blob_of(1, num_bytes)
    out = memoryview(bytearray(num_bytes))
    sealed.put_many([blob])
    writers = [threading.Thread(target=lambda: [sealed.put_many([blob]) for _ in range(5)]) for _ in range(2)]
    results: list[bytes | Fault] = []

    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        results += sealed.read_many([blob.key], [out])
    join(*writers)
    results += sealed.read_many([blob.key], [out])

    assert set(results) <= {blob.digest, Fault.MISSING}
    assert results[-1] == blob.digest


@pytest.mark.parametrize("rest", [b"", b"x", bytes(18), b"\xff" * 18, b"\xff" * 5000])
def test_what_only_begins_like_parts_is_refused(redis_server: RedisServer, store: RedisRemote, rest: bytes) -> None:
    with redis_server.client() as client:
        client.set(redis_name(key_of(1)), b"KVTP" + rest)

    assert read_blocks(store, 1)[0] in (Fault.MISSING, Fault.CORRUPT, Fault.TORN)
    assert put_blocks(store, 1) == [True]
    assert read_blocks(store, 1) == [blob_of(1).digest]


def test_memory_is_used_again_only_when_nobody_looks_at_it(store: RedisRemote) -> None:
    blobs = [blob_of(number, MIB // 4) for number in range(20)]
    SealedRemote(store).put_many(blobs)
    rng = random.Random(7)
    held: dict[int, memoryview] = {}

    for _ in range(100):
        number = rng.randrange(20)
        (value,) = store.get_many([blobs[number].key])
        assert isinstance(value, memoryview)
        held[number] = value[73:]  # a view of a view holds the memory too
        if len(held) > 5:
            held.pop(rng.choice(list(held)))
        assert all(view == blobs[number].raw for number, view in held.items())
