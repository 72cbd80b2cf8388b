"""The queue of requests that have not started, ordered by priority, then by arrival."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from kvtier.engine.scheduling.request import Request


class WaitingQueue:
    """Waiting requests in the order in which they start. A lower `RequestOptions.priority` is more urgent.

    Owned by the engine's thread.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """Request whose turn is next. Raises IndexError if the queue is empty."""
        return self._requests[0]

    def add(self, request: Request) -> None:
        """Queue a new request behind all requests of the same priority."""
        self._requests.insert(bisect_right(self._requests, request.options.priority, key=_priority), request)

    def add_again(self, request: Request) -> None:
        """Queue a preempted request ahead of all requests of the same priority, because it was already running."""
        self._requests.insert(bisect_left(self._requests, request.options.priority, key=_priority), request)

    def remove(self, request: Request) -> None:
        """Remove a request that starts or was aborted. Raises ValueError if it is not in the queue."""
        self._requests.remove(request)


def _priority(request: Request) -> int:
    return request.options.priority
