"""`Replica`: one of the servers behind the router, with its last known health and load."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from kvtier.routing.policy import Load


class Health(StrEnum):
    """The last known health of a replica."""

    UNKNOWN = "unknown"  # not polled yet
    READY = "ready"
    NOT_READY = "not_ready"  # alive, but loading its model or about to end
    DEAD = "dead"


class Replica:
    """A server behind the router: its address, its health, and its unfinished requests. Owned by the event loop."""

    def __init__(self, name: str, url: str = "", health: Health = Health.UNKNOWN) -> None:
        """Create a replica. *url* is its HTTP address, or empty if the replica is not called over HTTP."""
        self.name, self.url = name, url
        self.health = health
        self.is_draining = False  # an operator has stopped new requests to the replica
        self.num_failures = 0  # failed polls in a row
        self.num_elsewhere = 0  # requests at the replica that other routers have sent, as far as known
        self._num_requests = self._num_waiting_tokens = 0

    @property
    def is_open(self) -> bool:
        """True if new requests may be sent to the replica."""
        return self.health is Health.READY and not self.is_draining

    @property
    def num_sent(self) -> int:
        """Number of unfinished requests that this router has sent to the replica."""
        return self._num_requests

    @property
    def load(self) -> Load:
        """Known load of the replica. The waiting tokens do not include requests that other routers have sent."""
        return Load(self._num_requests + self.num_elsewhere, self._num_waiting_tokens)

    @contextmanager
    def working(self, num_tokens: int) -> Iterator["Work"]:
        """Count a request as load of the replica while the context is open.

        *num_tokens* is the number of prompt tokens that the replica must compute for the request.
        """
        work = Work(self, num_tokens)
        self._num_requests += 1
        self._num_waiting_tokens += num_tokens
        try:
            yield work
        finally:
            work.begin()
            self._num_requests -= 1

    def computed(self, num_tokens: int) -> None:
        """Record that *num_tokens* prompt tokens no longer wait to be computed."""
        self._num_waiting_tokens -= num_tokens


class Work:
    """A request at a replica. Its prompt tokens count as waiting until its answer begins."""

    def __init__(self, replica: Replica, num_tokens: int) -> None:
        self._replica = replica
        self._num_tokens = num_tokens

    def begin(self) -> None:
        """Stop counting the prompt tokens as waiting, because the answer has begun or the request has ended."""
        self._replica.computed(self._num_tokens)
        self._num_tokens = 0
