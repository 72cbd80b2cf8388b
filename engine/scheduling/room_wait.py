"""RoomWait: how long the queue waits until a hit can come up without pushing out a last copy."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.engine.scheduling.request import Request
from kvtier.tiers.lower.breaker import Attempt, CircuitBreaker


@dataclass(frozen=True, slots=True)
class _Wait:
    """Of the request at the head of the queue."""

    request: Request
    attempt: Attempt
    until: float


class RoomWait:
    """The head of the queue waits for room, and all behind it do, so it has a deadline. Waiting that was in vain is
    left alone for a while, by the rules of a circuit breaker: copies that are too slow hold up the queue once, and not
    for each request in its turn. Owned by the engine's thread.
    """

    def __init__(self, most_s: float, clock: Callable[[], float]) -> None:
        self._most_s = most_s
        self._clock = clock
        self._breaker = CircuitBreaker(clock)
        self._wait: _Wait | None = None

    def is_over(self, request: Request, has_room: bool) -> bool:
        """Whether the request at the head goes on: there is room, or waiting for it has been long enough, or is in
        vain."""
        if has_room:
            if self._wait is not None and self._wait.request is request:
                self._breaker.succeeded(self._wait.attempt)
                self._wait = None
            return True
        if self._wait is None or self._wait.request is not request:
            self._begin(request)
        if self._wait is not None and self._clock() < self._wait.until:
            return False
        if self._wait is not None:
            self._breaker.hung(self._wait.attempt)
            self._wait = None
        return True

    def _begin(self, request: Request) -> None:
        if self._wait is not None:  # it has left the queue, or another came before it
            self._breaker.withdrawn(self._wait.attempt)
        attempt = self._breaker.begin()
        self._wait = None if attempt is None else _Wait(request, attempt, self._clock() + self._most_s)
