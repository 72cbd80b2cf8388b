"""The remote stores under test, each with a way to reach past its contract to what it has stored."""

from typing import Protocol

from kvtier.store.remote.memory_remote import MemoryRemote
from kvtier.store.remote_store import RemoteStore


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
