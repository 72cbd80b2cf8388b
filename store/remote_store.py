"""The protocol `RemoteStore` of stores shared between machines, and the values that it accepts and returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from kvtier.store.record import Fault


class RemoteUnavailable(OSError):
    """Error raised if a remote store does not respond, or refuses the connection or the user. A retry may succeed."""


class RemoteRecord(NamedTuple):
    """A block that is ready to be stored. The value stored under *key* is *header* followed by *payload*.

    *payload* is the encoded and possibly encrypted block, and stays the property of the caller. *parent* is the key of
    the block before this one in its chain (the blocks of one prompt, in order), or b"" for the first block. A store
    that packs several records into one object uses *parent* to keep neighbours together.
    """

    key: bytes
    header: bytes
    payload: memoryview
    parent: bytes = b""


@dataclass(frozen=True, slots=True)
class RemoteUsage:
    """A client's requests to a remote store since it was opened. Operators pay per request."""

    num_reads: int = 0  # requests that read bytes
    num_writes: int = 0  # requests that write, delete or list
    num_questions: int = 0  # requests that check whether a key or an object exists
    read_bytes: int = 0  # of values, as transferred
    written_bytes: int = 0  # of values, as transferred


class RemoteStore(Protocol):
    """A store of sealed records that other clients also read, write and empty.

    The protocol promises less than `BlobStore`. Any record may be gone at any time, keys cannot be listed, and the
    eviction order is unknown. A returned value may be anything: another record, half a record, or foreign bytes. So the
    caller must verify each value with its key, as `SealedRemote` does.

    A method raises `RemoteUnavailable` if its whole request failed. If a part of the request succeeded, the result says
    which part. Each call ends within a few times the timeout with which the store was created. All methods are
    thread-safe and may run concurrently. Values returned by `get_many` belong to the caller.
    """

    @property
    def where(self) -> str:
        """The store's address for messages, without a password."""

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | Fault]:
        """Return for each key its value (the header followed by the payload) or a fault.

        The fault is `Fault.MISSING` if there is no value, and `Fault.IO_ERROR` if the request failed.
        """

    def put_many(self, records: Sequence[RemoteRecord]) -> list[bool]:
        """Store the records, overwriting existing values, and return for each whether it was stored.

        *records* belong to one chain or to several. Those of one chain are in its order, the first block first. False
        means that the store rejected the record (for example because it is full), or that the outcome is unknown,
        because a part of the store is unavailable.
        """

    def exist_many(self, keys: Sequence[bytes], apart: bool = False) -> list[bool | None]:
        """Return for each key whether a value exists, without reading it, or None if the request failed.

        The keys of one chain must be in the order of the chain. A store may stop searching a chain after a gap. With
        *apart*, the keys belong to no chain, so each key is searched for by itself.
        """

    def forget(self, namespace: bytes) -> None:
        """Delete everything whose key begins with *namespace* (16 bytes). For operators: the call has no deadline."""

    def usage(self) -> RemoteUsage:
        """Return the client's requests since the store was opened, as a snapshot."""

    def close(self) -> None:
        """Close the connections. Waiting calls and all later ones raise `RemoteUnavailable`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...
