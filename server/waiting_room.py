"""WaitingRoom: limits the running and waiting completions, and decides which requests go to the engine next."""

import asyncio
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtier.engine.sharing.turns import FairShare

_NUM_REMEMBERED = 64  # departures per tenant from which its rate is estimated
_LONGEST_WAIT_S = 600


class RoomFull(Exception):
    """Error raised when the waiting room is full. *retry_after_s* estimates the seconds until it has room again."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


@dataclass(eq=False, slots=True)
class Visit:
    """A request in the waiting room. `WaitingRoom.enter` creates it in the task that answers the request."""

    tenant: str | None
    num_completions: int
    priority: int
    task: asyncio.Task[object] | None  # answers the request; `send_away` cancels it
    has_turn: bool = False  # the request may go to the engine
    has_begun: bool = False  # the engine has returned the request's first token
    prompts: Sequence[Sequence[int]] = ()  # token ids that go to the engine; set once they are known
    refusal: Exception | None = None  # the error of `send_away`
    _turn_given: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for_turn(self) -> None:
        """Wait until the request may go to the engine."""
        await self._turn_given.wait()

    def give_turn(self) -> None:
        """Allow the request to go to the engine."""
        self.has_turn = True
        self._turn_given.set()

    def send_away(self, refusal: Exception) -> None:
        """Reject the request by raising *refusal* in the task that answers it."""
        if self.refusal is None and self.task is not None:
            self.refusal = refusal
            self.task.cancel()


class WaitingRoom:
    """A queue with room for *capacity* running and waiting completions. Owned by the event loop.

    Each request in the room is a visit. A visit waits for its turn, which is the permission to go to the engine.

    One tenant may fill the room. But if another tenant then sends a request within its fair share, waiting visits of
    the largest tenant are rejected to make room, the newest first.

    With several tenants, at most *num_turns* completions are in the engine at a time. The next turn goes to the tenant
    with the fewest completions in the engine. Among the visits of this tenant, it goes to the most urgent one, then to
    the oldest one.

    A rejected request is told when to retry. This estimate depends only on the recent rate at which completions of the
    request's own tenant ended, so it reveals nothing about other tenants.
    """

    def __init__(
        self,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
        num_turns: int | None = None,
        num_tenants: int = 1,
    ) -> None:
        self.share = FairShare(capacity, num_tenants)
        self._num_turns = capacity if num_turns is None else num_turns
        self._visits: dict[Visit, None] = {}  # in the order in which they entered
        self._pace: defaultdict[str | None, _Pace] = defaultdict(lambda: _Pace(clock))

    @property
    def capacity(self) -> int:
        """Maximum number of completions in the room."""
        return self.share.total

    @property
    def num_inside(self) -> int:
        """Number of completions in the room, running or waiting."""
        return sum(visit.num_completions for visit in self._visits)

    def share_among(self, num_tenants: int) -> None:
        """Set the number of tenants among which the waiting room's capacity is divided."""
        self.share = FairShare(self.capacity, num_tenants)

    @contextmanager
    def enter(self, num_completions: int, tenant: str | None = None, priority: int = 0) -> Iterator[Visit]:
        """Enter the room with a request of *num_completions* completions. The visit ends with the `with` block.

        Within a tenant, a lower *priority* is more urgent.

        Raises:
            RoomFull: If the room is full, or if the request is rejected while it waits, in favor of another tenant.
            Exception: The error that was passed to `Visit.send_away`.
        """
        self._make_room(num_completions, tenant)
        visit = Visit(tenant, num_completions, priority, _current_task())
        self._visits[visit] = None
        self._pace[tenant].enter(num_completions)
        self._give_turns()
        try:
            yield visit
        except asyncio.CancelledError:
            if visit.refusal is None or visit.task is None or visit.task.uncancel():
                raise  # it was cancelled from outside as well: the client has left
            raise visit.refusal from None
        finally:
            self._leave(visit)

    def reject_waiting(self, refusal: Callable[[], Exception], in_engine: Sequence[Sequence[int]]) -> None:
        """Reject every request that the engine has not started, with the error that *refusal* returns.

        These are the requests in the waiting room, and those requests in the engine of which all prompts
        (`Visit.prompts`) still wait there. *in_engine* lists the prompts, as token ids, that wait in the engine.
        Prompts are compared by identity, not by value.
        """
        waiting = {id(prompt) for prompt in in_engine}
        for visit in list(self._visits):
            waits = bool(visit.prompts) and all(id(prompt) in waiting for prompt in visit.prompts)
            if not visit.has_turn or (waits and not visit.has_begun):
                visit.send_away(refusal())

    def _make_room(self, num_completions: int, tenant: str | None) -> None:
        own = self._inside()[tenant] + num_completions
        if own <= self.share.each:
            while self.num_inside + num_completions > self.capacity and (visit := self._first_to_give_way()):
                self._leave(visit)
                visit.send_away(RoomFull(self._wait_s(visit.tenant, visit.num_completions)))
        if self.num_inside + num_completions > self.capacity:
            raise RoomFull(self._wait_s(tenant, num_completions))

    def _first_to_give_way(self) -> Visit | None:
        """Return the request to reject next: the newest waiting one of the largest tenant that exceeds its share."""
        for tenant, num_inside in self._inside().most_common():
            if num_inside <= self.share.each:
                return None
            for visit in reversed(self._visits):
                if visit.tenant == tenant and not visit.has_turn:
                    return visit
        return None

    def _inside(self) -> Counter[str | None]:
        inside: Counter[str | None] = Counter()
        for visit in self._visits:
            inside[visit.tenant] += visit.num_completions
        return inside

    def _leave(self, visit: Visit) -> None:
        if visit in self._visits:
            del self._visits[visit]
            self._pace[visit.tenant].leave(visit.num_completions)
            self._give_turns()

    def _give_turns(self) -> None:
        """Send waiting requests to the engine, up to the engine's limit on completions.

        If the next request would exceed the limit, it waits, and so do all requests behind it, even smaller ones.
        """
        limit = self.capacity if self.share.num_tenants <= 1 else self._num_turns
        while True:
            taken: Counter[str | None] = Counter()
            for visit in self._visits:
                taken[visit.tenant] += visit.num_completions * visit.has_turn
            waiting = [visit for visit in self._visits if not visit.has_turn]
            if not waiting:
                return
            visit = min(waiting, key=lambda each: (taken[each.tenant], each.priority))  # the oldest on a tie
            if taken.total() and taken.total() + visit.num_completions > limit:
                return
            visit.give_turn()

    def _wait_s(self, tenant: str | None, num_completions: int) -> int:
        own = self._inside()[tenant] + num_completions
        excess = max(1, min(num_completions, own - self.share.each))
        return self._pace[tenant].wait_s(excess)


class _Pace:
    """Completions of a tenant that leave the `WaitingRoom` per second, while any of the tenant's completions wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_inside = 0
        self._earlier_s = 0.0  # busy seconds (the tenant had completions inside) before *_busy_since*
        self._busy_since = 0.0
        # For each departure: the busy seconds until then, and the number of completions that left.
        self._left: deque[tuple[float, int]] = deque(maxlen=_NUM_REMEMBERED)

    def enter(self, num_completions: int) -> None:
        if not self._num_inside:
            self._busy_since = self._clock()
        self._num_inside += num_completions

    def leave(self, num_completions: int) -> None:
        self._left.append((self._busy_s(), num_completions))
        if self._num_inside == num_completions:
            self._earlier_s = self._busy_s()
        self._num_inside -= num_completions

    def wait_s(self, num_completions: int) -> int:
        """Return the estimated seconds until *num_completions* of the tenant's completions leave the `WaitingRoom`."""
        began_s = self._left[0][0] if len(self._left) > 1 else 0.0
        num_left = sum(num for _, num in self._left) - (self._left[0][1] if len(self._left) > 1 else 0)
        seconds = num_completions * (self._busy_s() - began_s) / max(1, num_left)
        return max(1, min(math.ceil(seconds), _LONGEST_WAIT_S))

    def _busy_s(self) -> float:
        return self._earlier_s + (self._clock() - self._busy_since if self._num_inside else 0.0)


def _current_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None
