"""Turns: gives the places of a resource to the tasks of tenants, in turns."""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FairShare:
    """Each of *num_tenants* is sure of an equal share of *total* units, and of one unit at least.

    How far a tenant may go beyond its share depends on how the resource comes back. A resource that is held for long
    (pinned host memory) ends at the share, so that a tenant learns nothing of the others. A resource that comes back by
    itself but cannot be taken away (a tokenizing thread) may be had up to `max_of_one`. A place in a queue, which can
    be taken away, may be had as long as no tenant with less than its share wants it.
    """

    total: int
    num_tenants: int

    @property
    def each(self) -> int:
        """The units that a tenant is sure of, however many the other tenants have."""
        return max(1, self.total // max(1, self.num_tenants))

    @property
    def max_of_one(self) -> int:
        """The most units of one tenant: all but one, which is kept for the others; all, if it is alone."""
        return self.total if self.num_tenants <= 1 else max(1, self.total - 1)


class Turns:
    """The places of *share*, each taken by a task that gives it back. Owned by the event loop.

    A free place goes to the tenant that has fewest, and among several such tenants to the one that was served longest
    ago. No tenant gets more than the share's `max_of_one`.
    """

    def __init__(self, share: FairShare) -> None:
        self.share = share
        self._taken: Counter[str | None] = Counter()
        self._waiting: dict[str | None, deque[asyncio.Future[None]]] = {}  # the tenant that was served last comes last

    @property
    def num_taken(self) -> int:
        """Places that are not free."""
        return self._taken.total()

    @property
    def num_waiting(self) -> int:
        """Tasks that wait for a place."""
        return sum(not turn.done() for queue in self._waiting.values() for turn in queue)

    async def take(self, tenant: str | None) -> None:
        """Wait for a place. A task that is cancelled meanwhile has no place, and none to give back."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place was given in the same moment
                self.give_back(tenant)
            raise

    def give_back(self, tenant: str | None) -> None:
        """Take one place from the tenant, and give it to the next task."""
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._serve()

    def _serve(self) -> None:
        while self.num_taken < self.share.total and (tenants := self._tenants_to_serve()):
            # Of several the first, which was served longest ago.
            tenant = min(tenants, key=lambda each: self._taken[each])
            queue = self._waiting.pop(tenant)
            queue.popleft().set_result(None)
            self._taken[tenant] += 1
            if queue:
                self._waiting[tenant] = queue

    def _tenants_to_serve(self) -> list[str | None]:
        for tenant, queue in list(self._waiting.items()):
            while queue and queue[0].done():  # its client has left
                queue.popleft()
            if not queue:
                del self._waiting[tenant]
        return [tenant for tenant in self._waiting if self._taken[tenant] < self.share.max_of_one]
