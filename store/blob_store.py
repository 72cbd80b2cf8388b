"""The protocol `BlobStore` of all local stores, and the values that it accepts and returns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from kvtier.store.record import DIGEST_BYTES, NAMESPACE_BYTES, Fault

TENANT_BYTES = 8
MAX_KEY_BYTES = 511  # LMDB's limit; all stores share it, so that they are interchangeable


@dataclass(frozen=True, slots=True)
class Blob:
    """One block to store.

    The caller keeps ownership of *raw* (format B, contiguous) and must not change it during the call. *digest* is
    `record.digest` of the raw bytes, computed when they were produced, so that a read also detects damage that the
    bytes suffered before they were written. *parent* is the key of the block before this one in its chain (the blocks
    of one prompt, in order), or b"" if there is none or if eviction order does not matter. A block is evicted before
    its parent. *tenant* is the tenant whose quota the block counts against (8 bytes), or b"" for none. A block and its
    parent have the same tenant.
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
    """Result of `Records.evict`."""

    keys: list[bytes]
    num_bytes: int  # that the evicted records counted against the capacity (`seal.charged_bytes`)


class StoreFull(OSError):
    """Error of a put that found no room even after evicting records, or that failed for another reason after evicting.

    The store stays usable.
    """

    evicted: Sequence[bytes] = ()  # keys that were evicted although nothing was stored


class StoreUnavailable(OSError):
    """Error raised while the store is not open. A later call may succeed."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Statistics of a store at one moment.

    Fields marked * survive reopening. Other totals count from when the store was opened.
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
    """The record operations of a store that a tier uses; see `BlobStore` for their guarantees."""

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        """Store *blobs*, the last one as the newest, and return the keys evicted to make room.

        The oldest records are evicted first, so pass the last block of a prefix first. A key that already has a record
        is only touched (see `touch`). A call stores all blobs or none. But a call of more than `data_file.part_bytes`
        is split into parts of at most that size, and each part is stored completely or not at all. After an OSError use
        `contains` to find out what was stored. Raises ValueError and stores nothing if a single blob exceeds the
        capacity.
        """

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        """Copy each block into its *out*, verify it there, and return for each key its digest or a fault.

        *out* must have exactly the block's raw length, which the key's namespace determines; otherwise the result is
        `Fault.TORN`. After a fault *out* holds arbitrary bytes. Bad records have been deleted when the call returns.
        """

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark the records of *keys* as recently used, so that eviction skips each record once.

        Keys without a record are ignored.
        """

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete the records of *keys* and return how many there were. Records of their child blocks stay."""

    def evict(self, num_bytes: int, limit: int, tenant: bytes = b"") -> Evicted:
        """Evict records of *tenant* (b"": of all tenants), the oldest first, until *num_bytes* fewer are stored.

        Evicts at most *limit* records, so call again for the rest. Returns no keys only if no records are left. These
        evictions are not counted in the statistics.
        """

    def keys(self) -> Iterator[bytes]:
        """Iterate over all keys, newest first. A record changed or touched meanwhile may be missing or appear twice."""

    def statistics(self) -> StoreStatistics: ...


class BlobStore(Records, Protocol):
    """A local store of blocks. A read returns exactly the bytes that were stored under the key, or a fault.

    The bytes of a key never change. At any moment `stored_bytes <= capacity_bytes`. Eviction follows the CLOCK
    algorithm. A touch, or a new child, marks a record as recently used. The oldest record is evicted unless it is
    marked; a marked record loses its mark and becomes the newest. No record is evicted before its children, so eviction
    leaves no gap in a prefix. A tenant with a quota never exceeds it: the excess is evicted from its own records, in
    the same order. All methods are thread-safe: reads run concurrently, changes one after another. An OSError means
    that the change did not happen. Every call after `close` raises ValueError.
    """

    def contains(self, key: bytes) -> bool:
        """Return whether *key* has a record. Reads no payload, so a later read may still find the record damaged."""

    def verify(self) -> Iterator[tuple[bytes, Fault | None]]:
        """Read every record, newest first, and yield its key and fault (None if good). Deletes and counts nothing."""

    def sync(self) -> None:
        """Block until everything stored so far is on disk."""

    def check(self) -> None:
        """Raise AssertionError if accounting, order and records disagree. Counts all records but reads no payload."""

    def close(self) -> None:
        """Close the store and release its resources. A second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...
