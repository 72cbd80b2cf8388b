"""`BlobStore`, the protocol of all local stores, and the types of its arguments and results."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from kvtier.store.record import DIGEST_BYTES, NAMESPACE_BYTES, Fault

TENANT_BYTES = 8
MAX_KEY_BYTES = 511  # LMDB's limit; all stores share it, so that they are interchangeable


@dataclass(frozen=True, slots=True)
class Blob:
    """A block to store.

    *raw* is a contiguous view of bytes in the caller's memory, which must not change during the call. *digest* is
    `record.digest` of these bytes, computed when they were produced. So a read also detects damage that happened
    before the bytes were written.

    *parent* is the key of the block before this one in the same prompt. It is b"" if there is no such block, or if
    eviction order does not matter. A block is evicted before its parent. *tenant* is the tenant (8 bytes) whose quota
    the block counts against, or b"" for none. A block and its parent have the same tenant.
    """

    key: bytes
    digest: bytes
    raw: memoryview
    parent: bytes = b""
    tenant: bytes = b""

    def __post_init__(self) -> None:
        if not NAMESPACE_BYTES <= len(self.key) <= MAX_KEY_BYTES:
            raise ValueError(f"block key has {len(self.key)} bytes; it must have {NAMESPACE_BYTES} to {MAX_KEY_BYTES}")
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"block digest has {len(self.digest)} bytes; it must have {DIGEST_BYTES}")
        if len(self.parent) > MAX_KEY_BYTES:
            raise ValueError(f"parent's key has {len(self.parent)} bytes; it may have at most {MAX_KEY_BYTES}")
        if len(self.tenant) not in (0, TENANT_BYTES):
            raise ValueError(f"tenant has {len(self.tenant)} bytes; it must have {TENANT_BYTES}, or 0 for no tenant")


class Evicted(NamedTuple):
    """Result of `Records.evict`: the evicted keys, and the bytes that became free."""

    keys: list[bytes]
    num_bytes: int  # bytes of the capacity that the evicted records took (`seal.charged_bytes`)


class StoreFull(OSError):
    """Error of a put that found no room, or that failed for another reason after it had evicted records.

    The store stays usable. *evicted* lists the keys that were evicted.
    """

    evicted: Sequence[bytes] = ()  # keys that were evicted, although nothing was stored


class StoreUnavailable(OSError):
    """Error raised while the store is not open. A later call may succeed."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Statistics of a store at one moment.

    Fields marked * keep their values when the store is closed and opened again. Other totals count from the last
    opening.
    """

    num_records: int
    stored_bytes: int  # sum of `seal.charged_bytes`, which counts against the capacity
    capacity_bytes: int
    file_bytes: int  # disk space in use now (`st_blocks`); 0 for a store in memory
    written_bytes_total: int  # * payload bytes, as stored
    recent_written_bytes: int  # * about the last day's bytes; older bytes decay
    evicted_total: int  # * records
    quota_evicted_total: int  # * part of `evicted_total`: records of tenants over their quota
    tenants: Mapping[bytes, int]  # * charged bytes of each tenant that has a quota
    faults: Mapping[Fault, int]  # failed reads by cause, without `missing`


class Records(Protocol):
    """The operations of a `BlobStore` that a tier uses. `BlobStore` describes the guarantees."""

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        """Store *blobs*, the last one as the newest record, and return the keys evicted to make room.

        The oldest records are evicted first, so pass the last block of a prompt first. A key that already has a record
        is only touched (see `touch`). Raises ValueError and stores nothing if a single blob exceeds the capacity.

        Blobs of up to `data_file.part_bytes` in total are all stored, or none is. Larger calls are split into parts,
        and each part is stored completely or not at all. After an OSError, use `contains` to find out what was stored.
        """

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        """Copy each block into its buffer in *outs*, verify it there, and return for each key its digest or a fault.

        A buffer must have exactly the block's raw length, which the key's namespace determines. Otherwise the result is
        `Fault.TORN`. After a fault, the buffer holds arbitrary bytes. Bad records have been deleted when the call
        returns.
        """

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark the records of *keys* as recently used, so that the next eviction skips each of them once.

        Keys without a record are ignored.
        """

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete the records of *keys* and return how many were deleted. Records of their child blocks stay."""

    def evict(self, num_bytes: int, limit: int, tenant: bytes = b"") -> Evicted:
        """Evict the oldest records of *tenant* (b"": of all tenants) to free *num_bytes* of the capacity.

        One call evicts at most *limit* records, so call again for the rest. If the result has no keys, no records are
        left. These evictions are not counted in the statistics.
        """

    def keys(self) -> Iterator[bytes]:
        """Iterate over all keys, newest first.

        A key that is touched or changed during the iteration may be missing or appear twice.
        """

    def statistics(self) -> StoreStatistics: ...


class BlobStore(Records, Protocol):
    """A local store of blocks. A read returns exactly the bytes that were stored under the key, or a fault.

    The bytes of a key never change. The stored bytes never exceed the capacity. All methods are thread-safe: reads run
    concurrently, changes one after another. A change that raises OSError may have happened completely, in part or not
    at all. After `close`, every other call raises ValueError.

    Eviction follows the CLOCK algorithm. Touching a record, or storing a child block of it, marks the record as
    recently used. Eviction takes the oldest record. If that record is marked, it loses its mark and becomes the newest
    instead. A record is never evicted before the records of its child blocks, so eviction leaves no gap in a prefix. If
    a tenant would exceed its quota, its own records are evicted, in the same order.
    """

    def contains(self, key: bytes) -> bool:
        """Return whether *key* has a record. The payload is not read, so a later read may still find it damaged."""

    def verify(self) -> Iterator[tuple[bytes, Fault | None]]:
        """Read every record, newest first, and yield its key and its fault (None if it is good).

        Bad records are neither deleted nor counted.
        """

    def sync(self) -> None:
        """Block until everything stored so far is on disk."""

    def check(self) -> None:
        """Raise AssertionError if counters, eviction order and records disagree. Reads all records, but no payloads."""

    def close(self) -> None:
        """Close the store and release its resources. A second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...
