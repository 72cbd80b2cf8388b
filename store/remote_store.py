"""The protocol `RemoteStore`, which every store that machines share keeps, and the values that go over it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from kvtier.store.record import Fault


class RemoteUnavailable(OSError):
    """A remote store gave no answer in time, refused the connection, or refused who asks. It may answer later."""


class RemoteRecord(NamedTuple):
    """A sealed block: what is put under *key* is *header*, then *payload*, one after the other.

    *parent* is the key of the block before it in its chain, b"" if it is the chain's first: a store that packs records
    puts those that continue each other together. The memory of *payload* stays the caller's.
    """

    key: bytes
    header: bytes
    payload: memoryview
    parent: bytes = b""


@dataclass(frozen=True, slots=True)
class RemoteUsage:
    """What a client has asked of a remote store since it was opened. Requests are what an operator pays for."""

    num_reads: int = 0  # requests that read bytes
    num_writes: int = 0  # requests that write, delete or list
    num_questions: int = 0  # requests that ask whether something is there
    read_bytes: int = 0  # of values, as they came
    written_bytes: int = 0  # of values, as they went


class RemoteStore(Protocol):
    """Sealed records in a store that others read, write and empty too.

    It promises less than a `BlobStore`: any record may be gone at any time, nothing is listed, nothing leaves in an
    order that we know, and what comes back may be anything at all: another record, half of one, one that somebody
    wrote. Its caller opens each value with its key (`SealedRemote`), so nothing that a store does gives wrong bytes.

    Failure: a method raises `RemoteUnavailable` if nothing of what was asked could be done; what could be done in part
    is told by its result. Each call ends within a few times the timeout that the store was made with.

    Ownership: all methods may be called from any thread, beside each other. A value that `get_many` gives is the
    caller's.
    """

    @property
    def where(self) -> str:
        """The store's address for people: no password in it."""

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | Fault]:
        """For each key its value, header and payload; `Fault.MISSING` if there is none, `Fault.IO_ERROR` if it could
        not be asked for."""

    def put_many(self, records: Sequence[RemoteRecord]) -> list[bool]:
        """Put the records, each over what was under its key; for each whether that was done.

        *records* are of one chain or of several; those of one chain come in its order, the first block first. False
        means that the store took it not, or that this is not known: for lack of room, or as part of the store is away.
        """

    def ask_many(self, keys: Sequence[bytes], apart: bool = False) -> list[bool | None]:
        """For each key whether there is something under it, without reading it; None where that could not be asked.
        Keys of one chain come in its order; *apart*: they are of no chain, and each may be there without those before
        it."""

    def forget(self, namespace: bytes) -> None:
        """Delete everything whose key begins with *namespace* (16 bytes). For operators: takes as long as it takes."""

    def usage(self) -> RemoteUsage:
        """What has been asked of the store since it was opened, by value."""

    def close(self) -> None:
        """Give up connections. Calls that wait end with `RemoteUnavailable`, and so do all later ones."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...
