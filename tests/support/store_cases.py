"""The stores under test, and a way to damage what they hold."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import lmdb
import numpy as np

from kvtier.store.blob_store import Blob, BlobStore
from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import Codec
from kvtier.store.lmdb.data_file import index_bytes
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.lmdb.tables import MAX_DBS, RecordRow
from kvtier.store.memory_store import MemoryStore
from kvtier.store.process.store_process import StoreProcess
from kvtier.store.record import HEADER_BYTES, digest
from kvtier.store.slab import Slabs
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


def rot(store: MemoryStore, key: bytes, rng: random.Random) -> None:
    """Flip one bit of the stored payload."""
    row = store.rows[key]
    payload = bytearray(row.payload)
    payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
    store.rows[key] = replace(row, payload=bytes(payload))


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
        return store.rows[key].header, store.rows[key].payload

    def overwrite(self, store: BlobStore, key: bytes, header: bytes, payload: bytes) -> None:
        assert isinstance(store, MemoryStore)
        store.rows[key] = replace(store.rows[key], header=header, payload=payload)


class LmdbCase:
    def __init__(self, codec: Codec, folder: Path, cipher: Cipher | None = None) -> None:
        self.codec = codec
        self.folder = folder
        self.cipher = cipher

    def open(self, capacity_bytes: int = 10 << 20, quotas: Mapping[bytes, int] = NO_QUOTAS) -> BlobStore:
        return LmdbStore(self.folder, capacity_bytes, self.codec, self.cipher, quotas=quotas)

    def stored(self, store: BlobStore, key: bytes) -> tuple[bytes, bytes]:
        """Reached past the store, as other processes can."""
        with self._index(store) as (env, records), env.begin() as txn:
            packed = txn.get(key, db=records)
        assert packed is not None
        row = RecordRow.unpack(key, packed)
        payload = bytearray(row.slot.num_bytes)
        slabs = Slabs(self.folder)
        slabs.read([row.slot], [memoryview(payload)])
        slabs.close()
        return row.header, bytes(payload)

    def overwrite(self, store: BlobStore, key: bytes, header: bytes, payload: bytes) -> None:
        with self._index(store) as (env, records), env.begin(write=True) as txn:
            packed = txn.get(key, db=records)
            assert packed is not None
            row = RecordRow.unpack(key, packed)
            parent = row.parent if len(header) == HEADER_BYTES else b""
            txn.put(key, row._replace(header=header, parent=parent).pack(key), db=records)
        slabs = Slabs(self.folder)
        slabs.write([row.slot], [memoryview(payload)[: row.slot.num_bytes]])
        slabs.close()

    @contextmanager
    def _index(self, store: BlobStore) -> Iterator[tuple[Any, Any]]:
        """Environment and records; another process's as LMDB allows, once more here would be wrong."""
        if isinstance(store, LmdbStore):
            yield store.files.tables.env, store.files.tables.records
            return
        env = lmdb.open(str(self.folder), map_size=index_bytes(10 << 20), max_dbs=MAX_DBS, writemap=True, sync=False)
        try:
            yield env, env.open_db(b"records")
        finally:
            env.close()


class ProcessCase(LmdbCase):
    """The store is in another process."""

    def open(self, capacity_bytes: int = 10 << 20, quotas: Mapping[bytes, int] = NO_QUOTAS) -> BlobStore:
        return StoreProcess(StoreSettings(self.folder, capacity_bytes, self.codec, quotas=quotas))
