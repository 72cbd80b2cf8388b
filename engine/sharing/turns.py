"""Fair sharing of a limited resource among tenants."""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FairShare:
    """An equal share of a resource for each of *num_tenants* tenants, at least one of its *total* units each.

    A tenant may exceed its share by an amount that depends on the resource:

    - Pinned host memory is held for long. A tenant gets at most its share, so it cannot tell how much others use.
    - A tokenizer thread becomes free soon, but cannot be taken away. A tenant gets at most `max_of_one` threads.
    - A place in a queue can be taken away. A tenant may use all places until a tenant below its share needs one.
    """

    total: int
    num_tenants: int

    @property
    def each(self) -> int:
        """Number of units of the resource that each tenant is guaranteed, whatever the other tenants use."""
        return max(1, self.total // max(1, self.num_tenants))

    @property
    def max_of_one(self) -> int:
        """Maximum number of units that one tenant may use: all but one if there are other tenants, otherwise all."""
        return self.total if self.num_tenants <= 1 else max(1, self.total - 1)


class Turns:
    """A semaphore that is fair to tenants: tasks take units and give them back. Owned by the event loop.

    There are `share.total` units. A free unit goes to the waiting tenant that uses the fewest units. Ties go to the
    tenant that was served longest ago. No tenant gets more than `share.max_of_one` units.
    """

    def __init__(self, share: FairShare) -> None:
        self.share = share
        self._taken: Counter[str | None] = Counter()
        self._waiting: dict[str | None, deque[asyncio.Future[None]]] = {}  # by tenant; the tenant served last is last

    @property
    def num_taken(self) -> int:
        """Number of the semaphore's units that tasks have taken."""
        return self._taken.total()

    @property
    def num_waiting(self) -> int:
        """Number of tasks that wait for one of the semaphore's units."""
        return sum(not turn.done() for queue in self._waiting.values() for turn in queue)

    async def take(self, tenant: str | None) -> None:
        """Wait for one of the semaphore's units and take it. A task that is cancelled while it waits takes none."""
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
        """Give back a unit of the semaphore that a task of the tenant has taken. The next waiting task gets it."""
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
