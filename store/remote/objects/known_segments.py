"""`KnownSegments`: a bounded cache of footers, which say in which object and where in it the value of a key is."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.store.remote.objects.segment import Entry
from kvtier.store.remote.objects.segment_names import folder_of

_MAX_KEYS = 200_000  # about 100 MB; a document of a million tokens has 62,500 blocks
_MAX_REFUSED = 1_000


class Place(NamedTuple):
    """Location of a value: an object, its version, and the bytes."""

    path: str
    tag: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class KnownSegment:
    """An object's footer. *tag* is the object's ETag, which changes with an overwrite, or "" if the store has none."""

    path: str
    tag: str
    entries: Sequence[Entry]


class KnownSegments:
    """The segments (objects that hold a run of blocks) whose footer this client has read or written.

    The least recently used segments are forgotten. Entries may be outdated. That does no harm, because every value that
    is read through them is verified. All methods are thread-safe.
    """

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._segments: OrderedDict[str, KnownSegment] = OrderedDict()
        self._places: dict[bytes, Place] = {}
        self._num_entries = 0
        self._refused: OrderedDict[tuple[str, str, bytes], None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, segment: KnownSegment) -> None:
        """Remember the entries of *segment*, except for refused ones. They replace earlier entries of the same keys."""
        with self._lock:
            self._forget(segment.path)
            self._segments[segment.path] = segment
            self._num_entries += len(segment.entries)
            for entry in segment.entries:
                if (segment.path, segment.tag, entry.key) not in self._refused:
                    self._places[entry.key] = Place(segment.path, segment.tag, entry)
            while self._num_entries > self._max_keys:
                self._forget(next(iter(self._segments)))

    def places(self, keys: Iterable[bytes]) -> dict[bytes, Place]:
        """Return the places of those *keys* that have one."""
        with self._lock:
            found = {key: place for key in keys if (place := self._places.get(key)) is not None}
            for path in {place.path for place in found.values()}:
                self._segments.move_to_end(path)
        return found

    def refuse(self, place: Place) -> None:
        """Never use *place* for its key again. The value there is damaged, and another object may hold the key too."""
        with self._lock:
            self._refused[place.path, place.tag, place.entry.key] = None
            while len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)
            if self._places.get(place.entry.key) == place:
                del self._places[place.entry.key]

    def forget(self, path: str) -> None:
        """Forget an object that is gone or was replaced."""
        with self._lock:
            self._forget(path)

    def forget_namespace(self, namespace: bytes) -> None:
        with self._lock:
            for path in [path for path in self._segments if path.startswith(folder_of(namespace))]:
                self._forget(path)

    def _forget(self, path: str) -> None:
        segment = self._segments.pop(path, None)
        if segment is None:
            return
        self._num_entries -= len(segment.entries)
        for entry in segment.entries:
            place = self._places.get(entry.key)
            if place is not None and place.path == path:
                del self._places[entry.key]
