"""What every store promises, and the values that go in and out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from kvtier.store.record import DIGEST_BYTES, NAMESPACE_BYTES, Fault

TENANT_BYTES = 8
MAX_KEY_BYTES = 511  # LMDB's limit; the others keep to it so that a store can be replaced by another


@dataclass(frozen=True, slots=True)
class Blob:
    """One block to put. *raw* (format B, contiguous) stays the caller's and must not change during the call.

    *digest* is `record.digest` of the raw bytes, taken when they were made: whatever damages them
    between then and the disk is found when they are read. *parent* is the key of the block that this
    one continues, b"" if there is none or nobody minds: such a block leaves the store before its parent.
    *tenant* (8 bytes, the same for a block and its parent, or b"") is whose quota it counts against.
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


class StoreFull(OSError):
    """There was no room for a block even after more records were evicted for it, or another error was met after that;
    the store stays usable."""

    evicted: Sequence[bytes] = ()  # keys that had to go all the same


class StoreUnavailable(OSError):
    """The store is not open now, and may be later."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A store in figures. Totals marked * survive reopening, the others count since opening."""

    num_records: int
    stored_bytes: int  # sum of `seal.charged_bytes`: what counts against the capacity
    capacity_bytes: int
    file_bytes: int  # what the store takes on the medium now (`st_blocks`); 0 in memory
    written_bytes_total: int  # * payload bytes as stored
    written_lately_bytes: int  # * of these about what the last day saw: older ones count less and less
    read_bytes_total: int  # raw bytes that were read and verified
    evicted_total: int  # * records
    tenants: Mapping[bytes, int]  # * bytes stored of those with a quota, charged as in `stored_bytes`
    faults: Mapping[Fault, int]  # failed reads by cause; `missing` is no failure and not counted


class Records(Protocol):
    """What a tier asks of a store: see `BlobStore`."""

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        """Store *blobs*, the last one becoming the newest; the keys evicted for them.

        So pass the tail of a prefix first: of one call, the first blob is evicted first. A key that is
        there already is only touched. All or nothing, except that a call of more than
        `data_file.part_bytes` is done in parts of that size; ask `contains` after an OSError.
        ValueError, and nothing stored, when a blob alone is larger than the capacity.
        """

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        """Copy each block into its *out* and verify it there; per key its digest, or why there is nothing.

        *out* has exactly the block's raw length (else `Fault.TORN`: a key's namespace fixes it) and
        holds anything after a fault. A bad record is gone for all threads when this returns.
        """

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark *keys*: each is passed over once when room is made. Those not there are ignored."""

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget *keys*; how many were there. What continues them stays."""

    def keys(self) -> Iterator[bytes]:
        """All keys, newest first; what comes, goes or gets new meanwhile may be missing or there twice."""

    def statistics(self) -> StoreStatistics: ...


class BlobStore(Records, Protocol):
    """Bytes at rest: a key gives back exactly the bytes that were put, or nothing.

    The bytes of a key never change. At any moment `stored_bytes <= capacity_bytes`. Records leave by
    CLOCK: the oldest goes unless it was touched, then it loses its mark and counts as new. No record leaves
    for room before one that continues it, so what stays is prefix-closed. All methods may be called from
    any thread: reads run side by side, changes one after another. A tenant with a quota never has more than that;
    for what is beyond it, its own records leave, in the same order. OSError means that the change did not
    happen. ValueError after `close`.
    """

    def contains(self, key: bytes) -> bool:
        """Whether *key* has a record; looks at no payload, so it is cheap and vouches for nothing."""

    def verify(self) -> Iterator[tuple[bytes, Fault | None]]:
        """Read every record, newest first, and say what is wrong with it; deletes and counts nothing."""

    def sync(self) -> None:
        """Return when everything put so far is on the medium."""

    def check(self) -> None:
        """AssertionError if accounting, order and records disagree; compares a full count, reads no payload."""

    def close(self) -> None:
        """Release everything; once more does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...
