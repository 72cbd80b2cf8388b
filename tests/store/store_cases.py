"""The stores under test, and a way to damage what they hold."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import lmdb
import numpy as np

from kvtier.store.blob_store import Blob, BlobStore
from kvtier.store.cipher import Cipher
from kvtier.store.codec import Codec
from kvtier.store.data_file import map_bytes
from kvtier.store.lmdb_store import LmdbStore
from kvtier.store.lmdb_tables import _ROW, Row
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import HEADER_BYTES, digest
from kvtier.store.store_process import StoreProcess
from kvtier.store.store_settings import StoreSettings

NAMESPACE = b"model-A layout-1"
NO_QUOTAS: Mapping[bytes, int] = {}


def key_of(number: int, namespace: bytes = NAMESPACE) -> bytes:
    return namespace + number.to_bytes(32, "big")


def kv_bytes(number: int, num_bytes: int) -> bytes:
    """bfloat16 noise that only *number* gives: the high bytes compress, the low ones do not."""
    noise = np.random.default_rng(number).standard_normal(num_bytes // 2, dtype=np.float32)
    return (noise.view(np.uint32) >> 16).astype("<u2").tobytes()


def blob_of(number: int, num_bytes: int = 20_000, namespace: bytes = NAMESPACE) -> Blob:
    raw = kv_bytes(number, num_bytes)
    return Blob(key_of(number, namespace), digest(raw), memoryview(raw))


def oldest_first(store: BlobStore) -> list[bytes]:
    return list(store.keys())[::-1]


class StoreCase(Protocol):
    """Opens a kind of store and reaches past its contract to what it has stored."""

    codec: Codec

    def open(self, capacity_bytes: int = 10 << 20, quotas: Mapping[bytes, int] = NO_QUOTAS) -> BlobStore: ...

    def stored(self, store: BlobStore, key: bytes) -> tuple[bytes, bytes]: ...

    def overwrite(self, store: BlobStore, key: bytes, header: bytes, payload: bytes) -> None: ...


class MemoryCase:
    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def open(self, capacity_bytes: int = 10 << 20, quotas: Mapping[bytes, int] = NO_QUOTAS) -> BlobStore:
        return MemoryStore(capacity_bytes, self.codec, quotas=quotas)

    def stored(self, store: BlobStore, key: bytes) -> tuple[bytes, bytes]:
        assert isinstance(store, MemoryStore)
        return store._rows[key].header, store._rows[key].payload

    def overwrite(self, store: BlobStore, key: bytes, header: bytes, payload: bytes) -> None:
        assert isinstance(store, MemoryStore)
        store._rows[key] = replace(store._rows[key], header=header, payload=payload)


class ProcessCase:
    """The store is in another process; what it has stored is reached past it, as LMDB allows."""

    def __init__(self, codec: Codec, folder: Path) -> None:
        self.codec = codec
        self.folder = folder

    def open(self, capacity_bytes: int = 10 << 20, quotas: Mapping[bytes, int] = NO_QUOTAS) -> BlobStore:
        return StoreProcess(StoreSettings(self.folder, capacity_bytes, self.codec, quotas=quotas))

    def stored(self, store: BlobStore, key: bytes) -> tuple[bytes, bytes]:
        with self._environment() as (env, records, payloads), env.begin() as txn:
            row, payload = txn.get(key, db=records), txn.get(key, db=payloads)
        assert row is not None
        assert payload is not None
        return Row.unpack(row).header, payload

    def overwrite(self, store: BlobStore, key: bytes, header: bytes, payload: bytes) -> None:
        with self._environment() as (env, records, payloads), env.begin(write=True) as txn:
            row = txn.get(key, db=records)
            assert row is not None
            parent = Row.unpack(row).parent if len(header) == HEADER_BYTES else b""
            txn.put(key, row[: _ROW.size] + header + parent, db=records)
            txn.put(key, payload, db=payloads)

    @contextmanager
    def _environment(self) -> Iterator[tuple[Any, Any, Any]]:
        env = lmdb.open(str(self.folder), map_size=map_bytes(10 << 20), max_dbs=5, writemap=True, sync=False)
        try:
            yield env, env.open_db(b"records"), env.open_db(b"payloads")
        finally:
            env.close()


class LmdbCase:
    def __init__(self, codec: Codec, folder: Path, cipher: Cipher | None = None) -> None:
        self.codec = codec
        self.cipher = cipher
        self.folder = folder

    def open(self, capacity_bytes: int = 10 << 20, quotas: Mapping[bytes, int] = NO_QUOTAS) -> BlobStore:
        return LmdbStore(self.folder, capacity_bytes, self.codec, self.cipher, quotas=quotas)

    def stored(self, store: BlobStore, key: bytes) -> tuple[bytes, bytes]:
        assert isinstance(store, LmdbStore)
        with store._tables.env.begin(buffers=True) as txn:
            found = store._tables.stored(txn, key)
            assert found is not None
            return found[0], bytes(found[1])

    def overwrite(self, store: BlobStore, key: bytes, header: bytes, payload: bytes) -> None:
        assert isinstance(store, LmdbStore)
        with store._tables.env.begin(write=True) as txn:
            row = txn.get(key, db=store._tables.records)
            assert row is not None
            parent = Row.unpack(row).parent if len(header) == HEADER_BYTES else b""
            txn.put(key, row[: _ROW.size] + header + parent, db=store._tables.records)
            txn.put(key, payload, db=store._tables.payloads)
