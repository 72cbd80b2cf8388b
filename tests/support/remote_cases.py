"""The remote stores under test, each with a way to reach past its contract to what it has stored."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from memory_remote import MemoryRemote
from redis_servers import SERVER, running_server
from store_cases import blob_of, key_of

from kvtier.store.record import Fault
from kvtier.store.remote.redis_settings import RedisSettings
from kvtier.store.remote.sealed_remote import SealedRemote
from kvtier.store.remote_store import RemoteStore, RemoteUnavailable

needs_redis = pytest.mark.skipif(SERVER is None, reason="needs redis-server: apt-get install redis-server")


REMOTES = ["file", pytest.param("redis", marks=needs_redis)]
"""Kinds of stores that machines may share, as a fixture's parameters; see `empty_remote`."""


@contextmanager
def empty_remote(kind: str, folder: Path) -> Iterator[str]:
    """The URL of an empty store of that kind, in the folder or served from there."""
    if kind == "file":
        yield f"file://{folder}/objects"
        return
    with running_server(folder) as redis:
        yield f"redis://{redis.address}"


class RemoteCase(Protocol):
    """One place where records are, to which any number of clients may be opened."""

    def open(self) -> RemoteStore: ...

    def stored(self, key: bytes) -> bytes:
        """The value as it is stored: header, then payload. KeyError if there is none."""

    def overwrite(self, key: bytes, value: bytes) -> None:
        """Put other bytes in the place of a stored value, of any length, as somebody who may write there can."""

    def lose(self, key: bytes) -> None:
        """Take a stored value away, as a server that evicts does."""


class MemoryRemoteCase:
    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}

    def open(self) -> RemoteStore:
        return MemoryRemote(self._values)

    def stored(self, key: bytes) -> bytes:
        return self._values[key]

    def overwrite(self, key: bytes, value: bytes) -> None:
        self._values[key] = value

    def lose(self, key: bytes) -> None:
        del self._values[key]


class RedisCase:
    """A server, or a cluster, that was emptied."""

    def __init__(self, settings: RedisSettings, owner_of: Callable[[bytes], Any]) -> None:
        """*owner_of* gives redis-py's client of the server that has a key."""
        self._settings = settings
        self._owner_of = owner_of

    def open(self) -> RemoteStore:
        from kvtier.store.remote.redis_remote import RedisRemote

        return RedisRemote(self._settings)

    def stored(self, key: bytes) -> bytes:
        name = redis_name(key)
        value: bytes | None = self._owner_of(name).get(name)
        if value is None:
            raise KeyError(key)
        return value

    def overwrite(self, key: bytes, value: bytes) -> None:
        name = redis_name(key)
        self._owner_of(name).set(name, value)

    def lose(self, key: bytes) -> None:
        name = redis_name(key)
        assert self._owner_of(name).delete(name) == 1


def redis_name(key: bytes) -> bytes:
    """What a record's key is called in a server."""
    return b"kvtier:{%b}" % key.hex().encode()


def put_blocks(store: RemoteStore, *numbers: int, num_bytes: int = 20_000) -> list[bool]:
    return SealedRemote(store).put_many([blob_of(number, num_bytes) for number in numbers])


def read_blocks(store: RemoteStore, *numbers: int, num_bytes: int = 20_000) -> list[bytes | Fault]:
    """The digest of each block, by which its bytes are known to be right, or its fault."""
    outs = [memoryview(bytearray(num_bytes)) for _ in numbers]
    return SealedRemote(store).read_many([key_of(number) for number in numbers], outs)


def why_unavailable(call: Callable[[], object]) -> str:
    """What people are told, in a line."""
    with pytest.raises(RemoteUnavailable) as told:
        call()
    text = str(told.value)
    assert "\n" not in text
    return text
