"""`KnownSegments`: a bounded cache of segment footers, which say where in which object the value of a key is."""

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
    """Location of a value: the object's path and ETag, and the value's entry in the object's footer."""

    path: str
    tag: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class KnownSegment:
    """The footer of a segment. *tag* is the ETag of the segment's object.

    An ETag changes when the object is overwritten. It is "" if the store has no ETags.
    """

    path: str
    tag: str
    entries: Sequence[Entry]


class KnownSegments:
    """A cache of the footers of the segments that this client has read or written.

    A segment is an object that holds a run of blocks. When the cache is full, the least recently used segment is
    forgotten. An outdated entry does no harm, because each value that is read is verified. All methods are thread-safe.
    """

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._segments: OrderedDict[str, KnownSegment] = OrderedDict()
        self._places: dict[bytes, Place] = {}
        self._num_entries = 0
        self._refused: OrderedDict[tuple[str, str, bytes], None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, segment: KnownSegment) -> None:
        """Remember the entries of *segment*, which replace earlier entries of the same keys.

        Entries whose value is known to be damaged (see `refuse`) are left out.
        """
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
        """Return the known places of *keys*, by key. A key without a known place is left out."""
        with self._lock:
            found = {key: place for key in keys if (place := self._places.get(key)) is not None}
            for path in {place.path for place in found.values()}:
                self._segments.move_to_end(path)
        return found

    def refuse(self, place: Place) -> None:
        """Never return *place* again, because the value there is damaged.

        Another object may still provide a place for the same key.
        """
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
