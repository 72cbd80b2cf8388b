"""SharedStore: one store for several layouts (models and KV formats), which tells each layout its evicted keys."""

from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue

from kvtier.store.blob_store import Blob, Evicted, Records, StoreFull, StoreStatistics
from kvtier.store.record import NAMESPACE_BYTES, Fault


class SharedStore:
    """A store for several layouts. Each layout has its own namespace of keys, and a view for that namespace.

    Storing blocks of one layout may evict blocks of another, so each view collects the evicted keys of its namespace.
    Transfer threads read and write through the views. The sidecar's thread calls `pop_evicted` and `take_cleared`.
    """

    def __init__(self, store: Records) -> None:
        self.store = store
        self._views: dict[bytes, StoreView] = {}

    def view(self, namespace: bytes) -> "StoreView":
        """Return a new view of the store for this namespace. Call it only once for each namespace."""
        view = self._views[namespace] = StoreView(self, namespace)
        return view

    def whole(self) -> "WholeStore":
        """Return a view of the records of all namespaces."""
        return WholeStore(self, b"")

    def report_cleared(self, keys: Sequence[bytes]) -> None:
        """Tell the `StoreView` of each key's namespace that an operator has deleted or evicted the key."""
        for key in keys:
            if (view := self._views.get(key[:NAMESPACE_BYTES])) is not None:
                view.cleared.put(key)

    def split_evicted(self, namespace: bytes, evicted: Sequence[bytes]) -> list[bytes]:
        """Return those *evicted* keys that belong to *namespace*. Pass the rest to the views of their namespaces."""
        own = []
        for key in evicted:
            if key.startswith(namespace):
                own.append(key)
            elif (view := self._views.get(key[:NAMESPACE_BYTES])) is not None:
                view.gone.put(key)
        return own


class StoreView:
    """A layout's view of a store that is shared with other layouts. Implements `Records`.

    Calls act on the whole store, but return only the evicted keys of this layout's namespace.
    """

    def __init__(self, shared: SharedStore, namespace: bytes) -> None:
        self.gone: SimpleQueue[bytes] = SimpleQueue()  # keys evicted for another namespace
        self.cleared: SimpleQueue[bytes] = SimpleQueue()  # keys cleared on request
        self._shared = shared
        self._store = shared.store
        self._namespace = namespace

    def pop_evicted(self) -> list[bytes]:
        """Return this layout's keys that other layouts' views have evicted, and that were not returned before."""
        return _taken(self.gone)

    def take_cleared(self) -> list[bytes]:
        """Return the keys of this namespace that calls of `WholeStore` have evicted or deleted since the last call."""
        return _taken(self.cleared)

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        try:
            return self._shared.split_evicted(self._namespace, self._store.put_many(blobs))
        except StoreFull as error:
            error.evicted = self._shared.split_evicted(self._namespace, error.evicted)
            raise

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        return self._store.read_many(keys, outs)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._store.touch(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        return self._store.delete(keys)

    def evict(self, num_bytes: int, limit: int, tenant: bytes = b"") -> Evicted:
        """Evict records of all namespaces; see `Records.evict`.

        The result has only the evicted keys of this namespace, but counts the bytes of all evicted records. The other
        keys are reported to the views of their namespaces.
        """
        evicted = self._store.evict(num_bytes, limit, tenant)
        return Evicted(self._shared.split_evicted(self._namespace, evicted.keys), evicted.num_bytes)

    def keys(self) -> Iterator[bytes]:
        return self._store.keys()

    def statistics(self) -> StoreStatistics:
        return self._store.statistics()


class WholeStore(StoreView):
    """A view of the records of all namespaces. Reports evicted and deleted keys to the views of their namespaces."""

    def evict(self, num_bytes: int, limit: int, tenant: bytes = b"") -> Evicted:
        evicted = self._store.evict(num_bytes, limit, tenant)
        self._shared.report_cleared(evicted.keys)
        return evicted

    def delete(self, keys: Sequence[bytes]) -> int:
        num_deleted = self._store.delete(keys)
        self._shared.report_cleared(keys)
        return num_deleted


def _taken(queue: SimpleQueue[bytes]) -> list[bytes]:
    keys: list[bytes] = []
    try:
        while True:
            keys.append(queue.get_nowait())
    except Empty:
        return keys
