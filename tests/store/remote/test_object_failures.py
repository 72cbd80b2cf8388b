"""Requests of an object store that fail while others go well: what is told of each key."""

from collections.abc import Iterator

import pytest
from chains import blobs_of, chain_keys, payload_of
from failing_objects import FailingObjects, failing_objects

from kvtier.store.record import Fault, digest
from kvtier.store.remote.object_remote import ObjectRemote
from kvtier.store.remote.object_settings import ObjectSettings
from kvtier.store.remote.sealed_remote import SealedRemote
from kvtier.store.remote_store import RemoteUnavailable

KEYS = chain_keys(100)
GOOD = [digest(payload_of(key)) for key in KEYS]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingObjects]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    with failing_objects() as server:
        yield server


def client_of(server: FailingObjects) -> ObjectRemote:
    return ObjectRemote(ObjectSettings("s3://bucket/prefix", server.endpoint, "us-east-1", allow_http=True))


def put(client: ObjectRemote) -> list[bool]:
    return SealedRemote(client).put_many(blobs_of(KEYS))


def read(client: ObjectRemote) -> list[bytes | Fault]:
    outs = [bytearray(120) for _ in KEYS]
    return SealedRemote(client).read_many(KEYS, [memoryview(out) for out in outs])


def largest(server: FailingObjects) -> str:
    return max(server.objects, key=lambda path: len(server.objects[path]))


def test_what_is_not_put_is_told_and_put_by_the_next_call(server: FailingObjects) -> None:
    with client_of(server) as client:
        put(client)
        refused = largest(server)
        server.objects.clear()
        server.fails = lambda method, path: path == refused

        done = put(client)

        assert {True, False} == set(done)
        server.fails = lambda method, path: False
        assert all(put(client))
        with client_of(server) as other:
            assert read(other) == GOOD


def test_what_cannot_be_read_is_an_error_and_the_rest_comes(server: FailingObjects) -> None:
    with client_of(server) as client:
        put(client)
        refused = largest(server)
        server.fails = lambda method, path: path == refused

        results = read(client)

        assert {result for result in results if isinstance(result, Fault)} == {Fault.IO_ERROR}
        assert [r for r in results if not isinstance(r, Fault)] == [
            good for result, good in zip(results, GOOD, strict=True) if not isinstance(result, Fault)
        ]
        server.fails = lambda method, path: False
        assert read(client) == GOOD


def test_what_cannot_be_asked_for_is_an_error_and_no_miss(server: FailingObjects) -> None:
    with client_of(server) as client, client_of(server) as stranger:
        put(client)
        refused = largest(server)
        server.fails = lambda method, path: path == refused

        assert set(stranger.exist_many(KEYS)) == {True, None}
        results = read(stranger)
        assert {result for result in results if isinstance(result, Fault)} == {Fault.IO_ERROR}


def test_an_object_that_is_shorter_now_is_a_miss_and_no_error(server: FailingObjects) -> None:
    with client_of(server) as client:
        put(client)
        server.objects[largest(server)] = b"short"

        results = read(client)

        assert {result for result in results if isinstance(result, Fault)} == {Fault.MISSING}


def test_a_request_is_tried_again_twice_before_it_has_failed(server: FailingObjects) -> None:
    with client_of(server) as client:
        refused: dict[str, int] = {}

        def fails_twice(method: str, path: str) -> bool:
            refused[path] = refused.get(path, 0) + 1
            return refused[path] <= 2

        server.fails = fails_twice
        assert all(put(client))
        assert server.num_refused == 2 * len(server.objects)


def test_a_store_of_which_every_request_fails_is_unavailable(server: FailingObjects) -> None:
    with client_of(server) as client:
        put(client)
        server.fails = lambda method, path: True

        for call in (read, put):
            with pytest.raises(RemoteUnavailable, match=r"s3://bucket/prefix: no answer \(status 503"):
                call(client)
        with client_of(server) as stranger, pytest.raises(RemoteUnavailable):
            stranger.exist_many(KEYS)
