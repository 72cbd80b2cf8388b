"""The protocol `BlobStore`, which every store keeps, and the values that go into a store and come out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from kvtier.store.record import DIGEST_BYTES, NAMESPACE_BYTES, Fault

TENANT_BYTES = 8
MAX_KEY_BYTES = 511  # LMDB's limit; every store keeps to it, so that one can replace another


@dataclass(frozen=True, slots=True)
class Blob:
    """One block to put. *raw* (format B, contiguous) stays the caller's and must not change during the call.

    *digest* is `record.digest` of the raw bytes, taken when they were made: damage done to them between
    then and the disk is found when they are read. *parent* is the key of the block that this one continues,
    b"" if there is none or its order does not matter: a block with a parent leaves the store before it.
    *tenant* (8 bytes, the same for a block and its parent, or b"") is the tenant against whose quota it counts.
    """

    key: bytes
    digest: bytes
    raw: memoryview
    parent: bytes = b""
    tenant: bytes = b""

    def __post_init__(self) -> None:
        if not NAMESPACE_BYTES <= len(self.key) <= MAX_KEY_BYTES:
            raise ValueError(f"key of {len(self.key)} bytes; need {NAMESPACE_BYTES} to {MAX_KEY_BYTES}")
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"digest of {len(self.digest)} bytes; need {DIGEST_BYTES}")
        if len(self.parent) > MAX_KEY_BYTES:
            raise ValueError(f"parent's key of {len(self.parent)} bytes; at most {MAX_KEY_BYTES}")
        if len(self.tenant) not in (0, TENANT_BYTES):
            raise ValueError(f"tenant of {len(self.tenant)} bytes; need {TENANT_BYTES} or none")


class Evicted(NamedTuple):
    """What `Records.evict` has evicted."""

    keys: list[bytes]
    num_bytes: int  # as in `stored_bytes`


class StoreFull(OSError):
    """A put found no room, even after records were evicted for it, or failed with another error after that.

    The store stays usable.
    """

    evicted: Sequence[bytes] = ()  # keys that were evicted, although nothing was put


class StoreUnavailable(OSError):
    """The store is not open now, and may be later."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Figures of a store at one moment. Those marked * survive reopening; other totals count since opening."""

    num_records: int
    stored_bytes: int  # sum of `seal.charged_bytes`: what counts against the capacity
    capacity_bytes: int
    file_bytes: int  # what the store takes on the medium now (`st_blocks`); 0 in memory
    written_bytes_total: int  # * payload bytes as stored
    written_lately_bytes: int  # * about those of the last day: older ones count less and less
    read_bytes_total: int  # raw bytes that were read and verified
    evicted_total: int  # * records
    quota_evicted_total: int  # * of these, records of a tenant that had more than its quota
    tenants: Mapping[bytes, int]  # * bytes stored by tenant, of those with a quota, charged as in `stored_bytes`
    faults: Mapping[Fault, int]  # failed reads by cause; `missing` is no failure and not counted


class Records(Protocol):
    """The records of a store, as a tier uses them: see `BlobStore`."""

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        """Store *blobs*, the last one as the newest, and return the keys evicted for them.

        So pass the tail of a prefix first: of one call, the first blob is evicted first. A key that has a
        record already is only touched. All blobs are stored or none, except that a call of more than
        `data_file.part_bytes` is done in parts of that size; ask `contains` after an OSError.
        ValueError, and nothing is stored, when a blob alone is larger than the capacity.
        """

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        """Copy each block into its *out*, verify it there, and return for each key its digest or a fault.

        *out* has exactly the block's raw length (else `Fault.TORN`: a key's namespace fixes it) and
        holds arbitrary bytes after a fault. A bad record has been deleted when this returns.
        """

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark the records of *keys*: eviction passes over each once. Keys without a record are ignored."""

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete the records of *keys* and return how many there were. Records that continue them stay."""

    def evict(self, num_bytes: int, limit: int, tenant: bytes = b"") -> Evicted:
        """Evict records in the order in which they leave, of *tenant* or of all, until *num_bytes* less are stored.

        At most *limit* records: ask again for the rest. None only if there are none left. They do not count as evicted.
        """

    def keys(self) -> Iterator[bytes]:
        """All keys, newest first. A record that is put, deleted or touched meanwhile may be missing or come twice."""

    def statistics(self) -> StoreStatistics: ...


class BlobStore(Records, Protocol):
    """A store of bytes at rest: a key gives back exactly the bytes that were put, or nothing.

    The bytes of a key never change. At any moment `stored_bytes <= capacity_bytes`. Records leave by
    CLOCK: the oldest leaves unless it is marked; a marked one loses its mark and becomes the newest. No record is
    evicted before one that continues it, so the records that stay are prefix-closed. All methods may be called from
    any thread: reads run side by side, changes one after another. A tenant with a quota never has more than that:
    records of its own are evicted for what is beyond it, in the same order. OSError means that the change did not
    happen. ValueError after `close`.
    """

    def contains(self, key: bytes) -> bool:
        """Whether *key* has a record. Reads no payload: it is cheap, and a read may still find the record damaged."""

    def verify(self) -> Iterator[tuple[bytes, Fault | None]]:
        """Read every record, newest first; gives its key and fault, None if it is good. Deletes and counts nothing."""

    def sync(self) -> None:
        """Return when everything put so far is on the medium."""

    def check(self) -> None:
        """Raise AssertionError if accounting, order and records disagree. Counts all records, reads no payload."""

    def close(self) -> None:
        """Close the store and free what it holds. A second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...
