"""RecentRecords: the newest records of requests, and the slowest ones of the last hour."""

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
    """A bounded memory of the newest and the slowest records. Owned by the thread that adds them.

    `add` passes each record to the *listeners*, and each record with its trail to the *trail_listeners*. A trail tells
    where each block of the prompt came from, and is not kept. Listeners must not raise.
    """

    def __init__(self, listeners: Sequence[Listener] = (), trail_listeners: Sequence[TrailListener] = ()) -> None:
        self._newest: deque[RequestRecord] = deque(maxlen=NUM_NEWEST)
        self._slowest: list[RequestRecord] = []  # slowest first
        self._listeners = tuple(listeners)
        self._trail_listeners = tuple(trail_listeners)

    def add(self, record: RequestRecord, trail: Trail = NO_TRAIL) -> None:
        """Add the record of a finished request, and call the listeners. *trail* tells where its blocks came from."""
        self._newest.append(record)
        since = record.arrived_at - SLOWEST_S
        self._slowest = [each for each in self._slowest if each.arrived_at >= since]
        insort(self._slowest, record, key=lambda each: -each.slowness_s)
        del self._slowest[NUM_SLOWEST:]
        for listener in self._listeners:
            listener(record)
        for trail_listener in self._trail_listeners:
            trail_listener(record, trail)

    def newest(self) -> Sequence[RequestRecord]:
        """Return a copy of the newest records, newest first."""
        return tuple(reversed(self._newest))

    def slowest(self) -> Sequence[RequestRecord]:
        """Return a copy of the slowest records of the hour before the last record, slowest first."""
        return tuple(self._slowest)
