"""Fair sharing of a limited resource among tenants."""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FairShare:
    """An equal share of *total* units for each of *num_tenants* tenants, at least one unit each.

    How far a tenant may exceed its share depends on how the resource is returned:

    - Held for long (pinned host memory): limited to the share, so that a tenant learns nothing of other tenants.
    - Returned by itself, but not revocable (a tokenizer thread): limited to `max_of_one`.
    - Revocable (a place in a queue): unlimited, until a tenant with less than its share wants the unit.
    """

    total: int
    num_tenants: int

    @property
    def each(self) -> int:
        """Units that a tenant is guaranteed, whatever the other tenants use."""
        return max(1, self.total // max(1, self.num_tenants))

    @property
    def max_of_one(self) -> int:
        """Limit on one tenant's units: all but one, which is kept for other tenants; all if it is the only tenant."""
        return self.total if self.num_tenants <= 1 else max(1, self.total - 1)


class Turns:
    """A limited number of units that tasks take and give back, shared fairly among tenants. Owned by the event loop.

    There are `share.total` units. A free unit goes to the waiting tenant that uses the fewest units; of several such
    tenants, to the one served longest ago. No tenant gets more than `share.max_of_one`.
    """

    def __init__(self, share: FairShare) -> None:
        self.share = share
        self._taken: Counter[str | None] = Counter()
        self._waiting: dict[str | None, deque[asyncio.Future[None]]] = {}  # by tenant; the tenant served last is last

    @property
    def num_taken(self) -> int:
        """Number of units in use."""
        return self._taken.total()

    @property
    def num_waiting(self) -> int:
        """Number of tasks that wait for a unit."""
        return sum(not turn.done() for queue in self._waiting.values() for turn in queue)

    async def take(self, tenant: str | None) -> None:
        """Wait for a unit. A task that is cancelled while it waits has no unit to give back."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the unit was granted at the same moment
                self.give_back(tenant)
            raise

    def give_back(self, tenant: str | None) -> None:
        """Return one unit of the tenant, and grant it to the next task."""
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._serve()

    def _serve(self) -> None:
        while self.num_taken < self.share.total and (tenants := self._tenants_to_serve()):
            # `min` returns the first of several, which was served longest ago.
            tenant = min(tenants, key=lambda each: self._taken[each])
            queue = self._waiting.pop(tenant)
            queue.popleft().set_result(None)
            self._taken[tenant] += 1
            if queue:
                self._waiting[tenant] = queue

    def _tenants_to_serve(self) -> list[str | None]:
        for tenant, queue in list(self._waiting.items()):
            while queue and queue[0].done():  # the task was cancelled
                queue.popleft()
            if not queue:
                del self._waiting[tenant]
        return [tenant for tenant in self._waiting if self._taken[tenant] < self.share.max_of_one]
