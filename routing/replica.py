"""Replica: one of the servers behind the router, and what is known of its health and load."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from kvtier.routing.policy import Load


class Health(StrEnum):
    """What a replica last said."""

    UNKNOWN = "unknown"  # it was not asked yet
    READY = "ready"
    NOT_READY = "not_ready"  # it lives, and loads its model or is about to end
    DEAD = "dead"


class Replica:
    """A server: where it is, how it is, and what was sent to it that has not ended. Owned by the event loop."""

    def __init__(self, name: str, url: str = "", health: Health = Health.UNKNOWN) -> None:
        """*url* is where it answers HTTP; empty for one that is reached in another way."""
        self.name, self.url = name, url
        self.health = health
        self.is_draining = False  # an operator wants no new request to go there
        self.num_failures = 0  # of asking how it is, in a row
        self.num_elsewhere = 0  # requests there that others have sent, as far as it says
        self._num_requests = self._num_waiting_tokens = 0

    @property
    def is_open(self) -> bool:
        """Whether requests may go there."""
        return self.health is Health.READY and not self.is_draining

    @property
    def num_sent(self) -> int:
        """Requests that this router has sent and that have not ended."""
        return self._num_requests

    @property
    def load(self) -> Load:
        """What it has to do, as far as is known: how long prompts are is known only of those that were sent here."""
        return Load(self._num_requests + self.num_elsewhere, self._num_waiting_tokens)

    @contextmanager
    def working(self, num_tokens: int) -> Iterator["Work"]:
        """A request is there, *num_tokens* of whose prompt have to be computed."""
        work = Work(self, num_tokens)
        self._num_requests += 1
        self._num_waiting_tokens += num_tokens
        try:
            yield work
        finally:
            work.begin()
            self._num_requests -= 1

    def computed(self, num_tokens: int) -> None:
        """So many tokens of prompts wait no longer."""
        self._num_waiting_tokens -= num_tokens


class Work:
    """A request at a replica: its prompt waits until its answer begins."""

    def __init__(self, replica: Replica, num_tokens: int) -> None:
        self._replica = replica
        self._num_tokens = num_tokens

    def begin(self) -> None:
        """The answer begins, or never will."""
        self._replica.computed(self._num_tokens)
        self._num_tokens = 0
