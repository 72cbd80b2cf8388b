"""`MemoryStore`: a minimal `BlobStore` in ordinary memory, for tests and for use without a disk."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Self

from kvtier.store.blob_store import Blob, Evicted, StoreStatistics
from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import NO_CODEC, Codec
from kvtier.store.codec.seal import check_fits, fault_of, seal, unseal
from kvtier.store.record import Fault


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record of a `MemoryStore`: its header and payload, and what eviction needs to know."""

    header: bytes
    payload: bytes
    charged_bytes: int
    parent: bytes
    tenant: bytes


class MemoryStore:
    """A `BlobStore` in memory, for tests and for use without a disk.

    A block counts the same number of bytes against the capacity as in an `LmdbStore`, so both evict the same blocks.
    """

    def __init__(
        self,
        capacity_bytes: int,
        codec: Codec = NO_CODEC,
        cipher: Cipher | None = None,
        quotas: Mapping[bytes, int] = MappingProxyType({}),
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._codec = codec
        self._cipher = cipher
        self._quotas = quotas
        self._lock = threading.RLock()  # guards everything below; each row is immutable
        self.rows: OrderedDict[bytes, StoredRecord] = (
            OrderedDict()
        )  # by key, oldest first; public because tests damage records
        self._marked: set[bytes] = set()  # keys of recently used records, which eviction skips once
        self._stored_bytes = 0
        self._tenants: Counter[bytes] = Counter()  # charged bytes of each
        self._written_bytes_total = 0
        self._evicted_total = self._quota_evicted_total = 0
        self._faults: Counter[Fault] = Counter()
        self._closed = False

    def contains(self, key: bytes) -> bool:
        with self._locked():
            return key in self.rows

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        check_fits(blobs, self._capacity_bytes, self._cipher)
        with self._locked():
            new = {blob.key: blob for blob in blobs if blob.key not in self.rows}
            rows = {key: self._row(blob) for key, blob in new.items()}  # encoding may fail, so it precedes any change
            for blob in blobs:
                self._mark(blob.parent if blob.key in rows else blob.key)
            tenants = dict.fromkeys(row.tenant for row in rows.values() if row.tenant in self._quotas)
            evicted = self._make_room(list(rows.values()), tenants)
            for key, row in rows.items():
                self._add(key, row)
            return evicted + self._make_room([], tenants)

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        return [self._read(key, out) for key, out in zip(keys, outs, strict=True)]

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._locked():
            for key in keys:
                self._mark(key)

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._locked():
            return sum(self._forget(key) for key in keys)

    def evict(self, num_bytes: int, limit: int, tenant: bytes = b"") -> Evicted:
        with self._locked():

            def stored_bytes() -> int:
                return self._tenants[tenant] if tenant else self._stored_bytes

            before = stored_bytes()
            gone = self._turn(stored_bytes, before - num_bytes, tenant or None, limit)
            return Evicted(gone, before - stored_bytes())

    def keys(self) -> Iterator[bytes]:
        with self._locked():
            return iter(list(reversed(self.rows)))

    def verify(self) -> Iterator[tuple[bytes, Fault | None]]:
        for key in self.keys():
            with self._locked():
                row = self.rows.get(key)
            if row is not None:
                yield key, fault_of(key, row.header, memoryview(row.payload), self._cipher)

    def sync(self) -> None:
        with self._locked():
            pass

    def statistics(self) -> StoreStatistics:
        with self._locked():
            return StoreStatistics(
                num_records=len(self.rows),
                stored_bytes=self._stored_bytes,
                capacity_bytes=self._capacity_bytes,
                file_bytes=0,
                written_bytes_total=self._written_bytes_total,
                recent_written_bytes=self._written_bytes_total,
                evicted_total=self._evicted_total,
                quota_evicted_total=self._quota_evicted_total,
                tenants={tenant: self._tenants[tenant] for tenant in self._quotas if self._tenants[tenant]},
                faults=dict(self._faults),
            )

    def check(self) -> None:
        with self._locked():
            recount = sum(row.charged_bytes for row in self.rows.values())
            assert recount == self._stored_bytes, f"stored_bytes is {self._stored_bytes}, recount {recount}"
            assert recount <= self._capacity_bytes, f"{recount} bytes exceed {self._capacity_bytes}"
            for tenant, quota in self._quotas.items():
                assert self._tenants[tenant] <= quota, f"a tenant has {self._tenants[tenant]} bytes of {quota}"
            assert self._marked <= self.rows.keys(), "a key is marked but has no record"
            places = {key: place for place, key in enumerate(self.rows)}
            for key, row in self.rows.items():
                is_safe = row.parent not in places or row.parent in self._marked or places[row.parent] > places[key]
                assert is_safe, "a record would be evicted before its child"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.rows.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _locked(self) -> threading.RLock:
        if self._closed:
            raise ValueError("store is closed")
        return self._lock

    def _row(self, blob: Blob) -> StoredRecord:
        sealed = seal(blob, self._codec, self._cipher)
        return StoredRecord(sealed.header, bytes(sealed.payload), sealed.charged_bytes, blob.parent, blob.tenant)

    def _add(self, key: bytes, row: StoredRecord) -> None:
        self.rows[key] = row
        self._mark(row.parent)
        self._stored_bytes += row.charged_bytes
        if row.tenant:
            self._tenants[row.tenant] += row.charged_bytes
        self._written_bytes_total += len(row.payload)

    def _forget(self, key: bytes) -> bool:
        row = self.rows.pop(key, None)
        if row is None:
            return False
        self._marked.discard(key)
        self._stored_bytes -= row.charged_bytes
        if row.tenant:
            self._tenants[row.tenant] -= row.charged_bytes
        return True

    def _mark(self, key: bytes) -> None:
        if key in self.rows:
            self._marked.add(key)

    def _make_room(self, rows: Sequence[StoredRecord], tenants: Iterable[bytes]) -> list[bytes]:
        """Evict until *rows* fit into the capacity, and the rows of each of *tenants* into its quota."""
        evicted: list[bytes] = []
        for tenant in tenants:
            quota = self._quotas[tenant]
            own = [row.charged_bytes for row in rows if row.tenant == tenant]
            evicted += self._turn(partial(self._tenants.__getitem__, tenant), quota - sum(own), tenant)
        self._quota_evicted_total += len(evicted)
        limit_bytes = self._capacity_bytes - sum(row.charged_bytes for row in rows)
        evicted += self._turn(lambda: self._stored_bytes, limit_bytes, None)
        self._evicted_total += len(evicted)
        return evicted

    def _turn(
        self, stored_bytes: Callable[[], int], limit_bytes: int, tenant: bytes | None, limit: int | None = None
    ) -> list[bytes]:
        """Evict records by the CLOCK algorithm until *stored_bytes* returns at most *limit_bytes*.

        Evicts only records of *tenant*, and at most *limit* records. None means all tenants or no limit.
        """
        evicted: list[bytes] = []
        while stored_bytes() > max(0, limit_bytes) and (limit is None or len(evicted) < limit):
            key, row = next((key, row) for key, row in self.rows.items() if tenant in (None, row.tenant))
            if key in self._marked:
                self._marked.discard(key)
                self.rows.move_to_end(key)
                self._mark(row.parent)
            else:
                self._forget(key)
                evicted.append(key)
        return evicted

    def _read(self, key: bytes, out: memoryview) -> bytes | Fault:
        with self._locked():
            row = self.rows.get(key)
        if row is None:
            return Fault.MISSING
        result = unseal(key, row.header, memoryview(row.payload), out, self._cipher)

        if isinstance(result, Fault):
            with self._lock:
                self._faults[result] += 1
                if result.is_bad_record and self.rows.get(key) is row:  # otherwise a good record has replaced it
                    self._forget(key)
        return result
