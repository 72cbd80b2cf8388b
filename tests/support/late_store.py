"""A store that opens late, goes away, or is opened anew with other content."""

from collections.abc import Iterator, Sequence

from small_cache import CHARGE

from kvtier.store.blob_store import Blob, Evicted, StoreStatistics, StoreUnavailable
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import Fault


class LateStore:
    """A `MemoryStore`, or none, or another: what `ReopeningStore` looks like from below."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self._store = store
        self._num_openings = int(store is not None)

    def opening(self) -> int:
        return 0 if self._store is None else self._num_openings

    def change(self, store: MemoryStore | None) -> None:
        """Another store from now on."""
        self._store = store
        self._num_openings += 1

    def begin_again(self) -> None:
        """Be empty, as after damage: the store's process has started again, which is no other opening."""
        self._store = empty()

    @property
    def _open(self) -> MemoryStore:
        if self._store is None:
            raise StoreUnavailable("not open")
        return self._store

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        return self._open.put_many(blobs)

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        return self._open.read_many(keys, outs)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._open.touch(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        return self._open.delete(keys)

    def evict(self, num_bytes: int, limit: int, tenant: bytes = b"") -> Evicted:
        return self._open.evict(num_bytes, limit, tenant)

    def keys(self) -> Iterator[bytes]:
        return self._open.keys()

    def statistics(self) -> StoreStatistics:
        return empty().statistics() if self._store is None else self._store.statistics()


def empty() -> MemoryStore:
    return MemoryStore(1000 * CHARGE)
