"""`ObjectRemote`: blocks in an object store (S3, Google Cloud Storage, Azure), or in a folder that machines share."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Self, TypeVar

from kvtier.store.record import NAMESPACE_BYTES, Fault
from kvtier.store.remote.object_settings import ObjectSettings
from kvtier.store.remote.objects.bucket import Bucket, ObjectGone
from kvtier.store.remote.objects.known_segments import KnownSegment, KnownSegments, Place
from kvtier.store.remote.objects.parallel_calls import ParallelCalls
from kvtier.store.remote.objects.segment import Packed, checksum, footer_bytes, pack, read_footer
from kvtier.store.remote.objects.segment_names import Segment, cut, folder_of
from kvtier.store.remote.objects.segment_search import SegmentSearch
from kvtier.store.remote_store import RemoteRecord, RemoteUnavailable, RemoteUsage

T = TypeVar("T")

_TAIL_BYTES = 32 << 10  # read from a segment's end to get its footer; enough for the footer of 500 blocks
_GAP_BYTES = 1 << 20  # if the gap between two values is at most this long, one request reads both values and the gap
_TIMEOUTS_PER_CALL = 3
_NAME_BYTES = 32


class ObjectRemote:
    """A `RemoteStore` in an object store. An object, called a segment, holds a run of consecutive blocks of a chain.

    A chain is the blocks of one prompt, in order; a record without a parent begins a chain. The name of a segment can
    be computed from the keys in it (see `segment_names`), so a client that has the keys need not list objects. This
    requires that each key determines the keys before it in its chain, as block names do (DESIGN.md section 4).

    The more consecutive blocks one call puts, the fewer and larger the objects are. One call may look up only one chain
    for each attention group (the layers that share one kind of attention). A second chain of the same group would be
    taken for a part of the first.
    """

    def __init__(self, settings: ObjectSettings) -> None:
        """Create a client; no request is sent yet.

        Raises `MissingExtra` if the package obstore is not installed, and ValueError if obstore cannot read the
        settings.
        """
        self._bucket = Bucket(settings)
        self._timeout_s = settings.timeout_s
        self._calls = ParallelCalls(settings.num_connections)
        self._known = KnownSegments()

    @property
    def where(self) -> str:
        return self._bucket.where

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | Fault]:
        call = self._call()
        places = self._find(_chains(keys), call)
        values = self._read(places, call)
        changed = places.keys() - values.keys()
        if changed:  # their segments were replaced or deleted, so look for them again
            places = self._find(_chains(keys), call)
            values |= self._read({key: places[key] for key in changed if key in places}, call)
        call.raise_if_all_failed()
        absent = Fault.IO_ERROR if call.errors else Fault.MISSING
        return [values.get(key, absent) for key in keys]

    def put_many(self, records: Sequence[RemoteRecord]) -> list[bool]:
        call = self._call()
        segments = cut(records)
        packed = [pack(segment.records) for segment in segments]  # copied now: the payloads are the caller's afterwards
        tags = call.run([partial(self._put, *put) for put in zip(segments, packed, strict=True)])
        call.raise_if_all_failed()
        done = {
            record.key
            for segment, tag in zip(segments, tags, strict=True)
            if tag is not None
            for record in segment.records
        }
        return [record.key in done for record in records]

    def exist_many(self, keys: Sequence[bytes], apart: bool = False) -> list[bool | None]:
        """See `RemoteStore`. A key found by an earlier call is not requested again, so its value may be gone by now."""
        call = self._call()
        places = self._find([[key] for key in keys] if apart else _chains(keys), call)
        if not places:
            call.raise_if_all_failed()
        not_found = None if call.errors else False
        return [True if key in places else not_found for key in keys]

    def forget(self, namespace: bytes) -> None:
        self._calls.check_open()
        self._bucket.delete_all(folder_of(namespace))
        self._known.forget_namespace(namespace)

    def usage(self) -> RemoteUsage:
        return self._bucket.meter.usage()

    def close(self) -> None:
        self._calls.close()
        self._bucket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self) -> "_Call":
        self._calls.check_open()
        return _Call(self._calls, time.monotonic() + _TIMEOUTS_PER_CALL * self._timeout_s)

    def _find(self, chains: Sequence[Sequence[bytes]], call: "_Call") -> dict[bytes, Place]:
        """Return the place (object and byte range) of each stored key. Sends requests only for uncached places."""
        keys = [key for chain in chains for key in chain]
        places = self._known.places(keys)
        searches = [SegmentSearch(chain, known=places) for chain in chains]
        while names := [name for search in searches for name in search.next_round()]:
            found = call.run([partial(self._learn, name.path, name.namespace) for name in names])
            if all(is_there is None for is_there in found):
                break  # the store does not answer
            places = self._known.places(keys)
            there = [name for name, is_there in zip(names, found, strict=True) if is_there]
            for search in searches:
                search.found(there, places)
        return places

    def _learn(self, path: str, namespace: bytes) -> bool:
        """Read the footer of the object at *path* and remember its entries. Returns False if no segment is there."""
        tail = self._bucket.read_tail(path, _TAIL_BYTES)
        num_bytes = footer_bytes(tail.data) if tail else None
        if tail is None or num_bytes is None or num_bytes > tail.object_bytes:
            return False
        data = tail.data
        if num_bytes > data.nbytes:
            try:
                data = self._bucket.read_range(path, tail.object_bytes - num_bytes, tail.object_bytes).data
            except ObjectGone:
                return False
        entries = read_footer(data, tail.object_bytes, namespace)
        entries = [entry for entry in entries if entry.num_bytes]  # an empty range cannot be requested
        self._known.add(KnownSegment(path, tail.tag, entries))
        return bool(entries)

    def _put(self, segment: Segment, packed: Packed) -> str:
        tag = self._bucket.put(segment.name.path, packed.data)
        self._bucket.meter.add(RemoteUsage(written_bytes=sum(entry.num_bytes for entry in packed.entries)))
        self._known.add(KnownSegment(segment.name.path, tag, packed.entries))
        return tag

    def _read(self, places: dict[bytes, Place], call: "_Call") -> dict[bytes, memoryview | Fault]:
        """Return the values at *places*, by key. A value is a fault if its request failed.

        A key is left out if its value is gone.
        """
        spans = _spans(places.values())
        read = call.run([partial(self._read_span, span) for span in spans])
        values: dict[bytes, memoryview | Fault] = {}
        for span, got in zip(spans, read, strict=True):
            values |= {place.entry.key: Fault.IO_ERROR for place in span.places} if got is None else got
        return values

    def _read_span(self, span: "_Span") -> dict[bytes, memoryview | Fault]:
        """Return the values of *span*, by key, after reading them with one request.

        If the object has been replaced, return only the values that have not moved, and read the new footer.
        """
        values: dict[bytes, memoryview | Fault] = {}
        with suppress(ObjectGone):
            read = self._bucket.read_range(span.path, span.start, span.end)
            self._bucket.meter.add(RemoteUsage(read_bytes=read.data.nbytes))
            for place in span.places:
                at = place.entry.start - span.start
                value = read.data[at : at + place.entry.num_bytes]
                if checksum(value) == place.entry.checksum:
                    values[place.entry.key] = value
                elif read.tag == span.tag:  # damaged: the caller detects that, and later lookups avoid this place
                    values[place.entry.key] = value
                    self._known.refuse(place)
        if len(values) < len(span.places):
            self._known.forget(span.path)
            self._learn(span.path, span.namespace)
        return values


def _chains(keys: Iterable[bytes]) -> list[list[bytes]]:
    """Group *keys* into chains, one for each namespace and attention group.

    A key consists of the namespace, the name of the block, and the attention group.
    """
    chains: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for key in dict.fromkeys(keys):
        chains[key[:NAMESPACE_BYTES] + key[NAMESPACE_BYTES + _NAME_BYTES :]].append(key)
    return list(chains.values())


class _Span(NamedTuple):
    """A byte range of an object that one request reads, and the places of the values in it."""

    path: str
    tag: str
    start: int
    end: int
    places: list[Place]

    @property
    def namespace(self) -> bytes:
        return self.places[0].entry.key[:NAMESPACE_BYTES]


def _spans(places: Iterable[Place]) -> list[_Span]:
    """Group *places* into as few requests as possible. One request reads values that are at most `_GAP_BYTES` apart."""
    by_object: defaultdict[tuple[str, str], list[Place]] = defaultdict(list)
    for place in places:
        by_object[place.path, place.tag].append(place)
    spans: list[_Span] = []
    for (path, tag), of_object in by_object.items():
        of_object.sort(key=lambda place: place.entry.start)
        end = -_GAP_BYTES - 1
        for place in of_object:
            if place.entry.start - end > _GAP_BYTES:
                spans.append(_Span(path, tag, place.entry.start, 0, []))
            end = place.entry.start + place.entry.num_bytes
            spans[-1].places.append(place)
            spans[-1] = spans[-1]._replace(end=end)
    return spans


class _Call:
    """A call of one of the store's methods. Runs the call's requests until the deadline, and collects their errors."""

    def __init__(self, calls: ParallelCalls, deadline: float) -> None:
        self.errors: list[RemoteUnavailable] = []
        self._calls = calls
        self._deadline = deadline
        self._num_done = 0

    def run(self, requests: Sequence[Callable[[], T]]) -> list[T | None]:
        """Run *requests* in parallel, and return the result of each, or None if it failed."""
        results = self._calls.run(requests, max(self._deadline - time.monotonic(), 0))
        errors = [result for result in results if isinstance(result, RemoteUnavailable)]
        self.errors += errors
        self._num_done += len(results) - len(errors)
        return [None if isinstance(result, RemoteUnavailable) else result for result in results]

    def raise_if_all_failed(self) -> None:
        """Raise the first error if no request succeeded."""
        if self.errors and not self._num_done:
            raise self.errors[0]
