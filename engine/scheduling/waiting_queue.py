"""WaitingQueue: the requests that have not started, the most urgent first, then in order of arrival."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from kvtier.engine.scheduling.request import Request


class WaitingQueue:
    """Lower numbers of `RequestOptions.priority` are more urgent. Owned by the engine's thread."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """Whose turn it is. IndexError if nobody waits."""
        return self._requests[0]

    def add(self, request: Request) -> None:
        """Behind all of the same priority."""
        self._requests.insert(bisect_right(self._requests, request.options.priority, key=_priority), request)

    def add_again(self, request: Request) -> None:
        """Before all of the same priority: it has been running already."""
        self._requests.insert(bisect_left(self._requests, request.options.priority, key=_priority), request)

    def remove(self, request: Request) -> None:
        """Whose turn has come, or who waits no longer. ValueError if it does not wait."""
        self._requests.remove(request)


def _priority(request: Request) -> int:
    return request.options.priority
