"""The stores under test, and a way to damage what they hold."""

from pathlib import Path
from typing import Protocol

import numpy as np

from kvtier.store.blob_store import Blob, BlobStore
from kvtier.store.codec import Codec
from kvtier.store.lmdb_store import LmdbStore
from kvtier.store.lmdb_tables import _ROW
from kvtier.store.memory_store import MemoryStore, _Row
from kvtier.store.record import digest

NAMESPACE = b"model-A layout-1"


def key_of(number: int, namespace: bytes = NAMESPACE) -> bytes:
    return namespace + number.to_bytes(32, "big")


def kv_bytes(number: int, num_bytes: int) -> bytes:
    """bfloat16 noise that only *number* gives: the high bytes compress, the low ones do not."""
    noise = np.random.default_rng(number).standard_normal(num_bytes // 2, dtype=np.float32)
    return (noise.view(np.uint32) >> 16).astype("<u2").tobytes()


def blob_of(number: int, num_bytes: int = 20_000, namespace: bytes = NAMESPACE) -> Blob:
    raw = kv_bytes(number, num_bytes)
    return Blob(key_of(number, namespace), digest(raw), memoryview(raw))


class StoreCase(Protocol):
    """Opens a kind of store and reaches past its contract to what it has stored."""

    codec: Codec

    def open(self, capacity_bytes: int = 10 << 20) -> BlobStore: ...

    def stored(self, store: BlobStore, key: bytes) -> tuple[bytes, bytes]: ...

    def overwrite(self, store: BlobStore, key: bytes, header: bytes, payload: bytes) -> None: ...


class MemoryCase:
    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def open(self, capacity_bytes: int = 10 << 20) -> BlobStore:
        return MemoryStore(capacity_bytes, self.codec)

    def stored(self, store: BlobStore, key: bytes) -> tuple[bytes, bytes]:
        assert isinstance(store, MemoryStore)
        return store._rows[key].header, store._rows[key].payload

    def overwrite(self, store: BlobStore, key: bytes, header: bytes, payload: bytes) -> None:
        assert isinstance(store, MemoryStore)
        store._rows[key] = _Row(header, payload, store._rows[key].charged_bytes)


class LmdbCase:
    def __init__(self, codec: Codec, folder: Path) -> None:
        self.codec = codec
        self.folder = folder

    def open(self, capacity_bytes: int = 10 << 20) -> BlobStore:
        return LmdbStore(self.folder, capacity_bytes, self.codec)

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
            txn.put(key, row[: _ROW.size] + header, db=store._tables.records)
            txn.put(key, payload, db=store._tables.payloads)
