"""An object store under test, reached past its contract."""

from collections.abc import Iterator
from typing import Any

import obstore
from obstore.store import from_url

from kvtier.store.record import HEADER_BYTES
from kvtier.store.remote.object_remote import ObjectRemote
from kvtier.store.remote.object_settings import ObjectSettings
from kvtier.store.remote.objects.segment import pack, read_footer
from kvtier.store.remote.objects.segment_names import folder_of
from kvtier.store.remote_store import RemoteRecord, RemoteStore


class ObjectRemoteCase:
    """An object store, reached past `ObjectRemote` by a client of its own."""

    def __init__(self, settings: ObjectSettings, **own_client: Any) -> None:
        self.settings = settings
        self.objects = from_url(settings.url, **own_client)

    def open(self) -> RemoteStore:
        return ObjectRemote(self.settings)

    def stored(self, key: bytes) -> bytes:
        for _, values in self._segments_of(key):
            return values[key]
        raise KeyError(key)

    def overwrite(self, key: bytes, value: bytes) -> None:
        """A segment like the one that was there, with a footer that is right."""
        for path, values in self._segments_of(key):
            self._put(path, values | {key: value})

    def lose(self, key: bytes) -> None:
        for path, values in self._segments_of(key):
            del values[key]
            self._put(path, values)

    def _segments_of(self, key: bytes) -> Iterator[tuple[str, dict[bytes, bytes]]]:
        """Name and values of each object that has a value for *key*."""
        for meta in obstore.list(self.objects, folder_of(key)).collect():
            data = memoryview(bytes(obstore.get(self.objects, meta["path"]).bytes()))
            entries = read_footer(data, data.nbytes, key[:16])
            values = {e.key: bytes(data[e.start : e.start + e.num_bytes]) for e in entries}
            if key in values:
                yield meta["path"], values

    def _put(self, path: str, values: dict[bytes, bytes]) -> None:
        records = [
            RemoteRecord(key, value[:HEADER_BYTES], memoryview(value)[HEADER_BYTES:]) for key, value in values.items()
        ]
        if records:
            obstore.put(self.objects, path, pack(records).data)
        else:
            obstore.delete(self.objects, path)
