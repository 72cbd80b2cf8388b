"""RecentRecords: the newest records, and the slowest of the last hour."""

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.trail import NO_TRAIL, Trail, TrailListener

NUM_NEWEST = 512
NUM_SLOWEST = 32
SLOWEST_S = 3600.0

Listener: TypeAlias = Callable[[RequestRecord], None]


class RecentRecords:
    """Bounded, whatever comes. Owned by the thread that adds; *listeners* are called there and raise nothing, and so
    are *trail_listeners*, which get the request's trail too: here no trail is kept."""

    def __init__(self, listeners: Sequence[Listener] = (), trail_listeners: Sequence[TrailListener] = ()) -> None:
        self._newest: deque[RequestRecord] = deque(maxlen=NUM_NEWEST)
        self._slowest: list[RequestRecord] = []  # slowest first
        self._listeners = tuple(listeners)
        self._trail_listeners = tuple(trail_listeners)

    def add(self, record: RequestRecord, trail: Trail = NO_TRAIL) -> None:
        """Take in the record of a request that has ended, and its trail."""
        self._newest.append(record)
        since = record.arrived_at - SLOWEST_S
        self._slowest = [each for each in self._slowest if each.arrived_at >= since]
        insort(self._slowest, record, key=lambda each: -each.slowness_s)
        del self._slowest[NUM_SLOWEST:]
        for listener in self._listeners:
            listener(record)
        for trail_listener in self._trail_listeners:
            trail_listener(record, trail)

    def find(self, request_id: str) -> RequestRecord | None:
        """The newest record of that request; None if there is none, or no more."""
        both = (*reversed(self._newest), *self._slowest)
        return next((record for record in both if record.request_id == request_id), None)

    def newest(self) -> Sequence[RequestRecord]:
        """The records that came last, newest first, by value."""
        return tuple(reversed(self._newest))

    def slowest(self) -> Sequence[RequestRecord]:
        """The slowest requests of the hour before the last record, slowest first, by value."""
        return tuple(self._slowest)
