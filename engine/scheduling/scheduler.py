"""Scheduler: which tokens to compute in the next step, for whom, and in which slots."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvtier.engine.config import SchedulerConfig
from kvtier.engine.scheduling.look_ahead import LookAhead
from kvtier.engine.scheduling.request import FinishReason, Request
from kvtier.engine.scheduling.room_wait import RoomWait
from kvtier.engine.scheduling.shared_prefill import SharedPrefill
from kvtier.engine.scheduling.slot_demand import SlotDemand
from kvtier.engine.scheduling.waiting_queue import WaitingQueue
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.hit_ratio import HitRatio
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.tier import Reason
from kvtier.tiers.up.load_planner import LoadPlanner
from kvtier.tiers.up.promotion import Hit, Promotion, Tables

MAX_PROMOTIONS = 3  # of one request: a corrupt block shortens the first, the second goes as far as is left
CUT_SHORT = frozenset({Reason.CORRUPT, Reason.EVICTED_FROM_DISK})
ARRIVAL_POLL_S = 0.01
# For what a step that began early was computed with: verifying is done when copying is, or hangs. Nobody else computes.
SETTLE_S = 1.0
ROOM_SHARE = 0.5  # of a load's time, which may pass before it begins: the rest is for loading
HIT_LASTS_S = 0.05  # while room is made for a hit it is not looked up again: 36 ms for 8,192 blocks on disk


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one request to compute in this step; their slots are in its tables."""

    request: Request
    num_tokens: int


class Scheduler:
    """Continuous batching under a token budget: decode first, then chunks of prefill, then new requests.

    A request whose prefix is being promoted is parked and blocks nobody. When slots run out, or are wanted by a more
    urgent request, the youngest of the least urgent that run goes back to the queue; what it computed stays cached and
    spills like everything else. Owned by the engine's thread.
    """

    def __init__(
        self,
        cache: TieredCache,
        config: SchedulerConfig,
        load_timeout_s: float,
        planner: LoadPlanner | None = None,
        clock: Callable[[], float] = time.monotonic,
        look_ahead: LookAhead | None = None,
    ) -> None:
        """*load_timeout_s*: so long after it first asks for room a request starts with what has come of its hit."""
        self.waiting = WaitingQueue()
        self.promoting: list[Request] = []
        self.running: list[Request] = []
        self.admitted_tokens = TokenBalance()  # of all prompts so far
        self.hit_ratio = HitRatio()
        self._cache = cache
        self._config = config
        self._timeout_s = load_timeout_s
        self._room_wait = RoomWait(ROOM_SHARE * load_timeout_s, clock)
        self._planner = planner
        self._look_ahead = look_ahead
        self._clock = clock
        self._max_running = min(config.max_running, config.token_budget)  # so that each of them can decode in a step
        self._shared_prefill = SharedPrefill(config.prefill_chunk)
        self._demand = SlotDemand(cache, config.prefill_chunk)
        self._num_slots = cache.free_slots()  # nothing is leased yet: all there are

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.waiting or self.promoting or self.running)

    def add(self, request: Request) -> None:
        """Queue the request. ValueError if it could not run even alone, or the queue is full."""
        num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        needed = self._demand.of(num_tokens)
        for blocks, num_slots in zip(needed, self._num_slots, strict=True):
            if blocks > num_slots:
                raise ValueError(
                    f"prompt of {len(request.prompt_token_ids)} tokens and {request.sampling.max_tokens} more need "
                    f"{blocks} blocks, the device holds {num_slots}; raise device.capacity or shorten the prompt"
                )
        if len(self.waiting) >= self._config.max_waiting:
            raise ValueError(f"queue: {len(self.waiting)} requests are waiting already; raise scheduler.max_waiting")
        self.waiting.add(request)

    def abort(self, request: Request) -> None:
        """End the request wherever it is; its leases end now."""
        if request.finish_reason is not None:
            return
        request.finish(FinishReason.ABORT)
        for queue in (self.waiting, self.promoting, self.running):
            if request in queue:
                queue.remove(request)
        if self._look_ahead is not None:
            self._look_ahead.forget(request)
        self._release(request)

    def schedule(self) -> list[Work]:
        """The next step's work, its slots leased. Empty while everything waits for promotions."""
        self._cache.poll()
        for request in [parked for parked in self.promoting if parked.promotion and parked.promotion.done]:
            self.promoting.remove(request)
            self._start(request)
        for request in self.running:
            if (rest := request.split) is not None and rest.done and request.num_computed >= rest.start:
                self._rejoin(request, rest)
        step: list[Work] = []
        budget = self._config.token_budget
        by_priority = sorted(self.running, key=_priority)
        for request in [r for r in by_priority if r.is_decoding]:
            budget -= self._add_work(request, budget, step)
        for request in [r for r in by_priority if not r.is_decoding]:
            budget = self._let_in(step, budget, before=request.options.priority)
            budget -= self._add_work(request, budget, step)
        self._let_in(step, budget)
        if self._look_ahead is not None and self.waiting:
            self._look_ahead.look(self.waiting)
        if not step:
            self._begin_early(step)
        return step

    def settle(self, work: Sequence[Work]) -> list[Request]:
        """Wait a moment for the prefixes that were arriving while the step was computed; the requests whose did not
        arrive as expected. What was computed for these counts for nothing: they start again from what is there, or go
        on waiting for it while others compute."""
        lost = []
        give_up_at = self._clock() + SETTLE_S
        for request in [item.request for item in work]:
            promotion = request.promotion
            if promotion is None or request.split:
                continue
            while not promotion.done and self._clock() < give_up_at:
                self._cache.wait(ARRIVAL_POLL_S)
            num_copied = request.num_computed - request.num_committed
            own = self._leases_besides_promotion(request)
            if not promotion.done:
                self._cache.release(own)
                request.tables = []
                promotion.gate = None  # it is not begun with a second time
                lost.append(request)
                continue
            self.promoting.remove(request)
            if (promotion.num_tokens, promotion.num_copied) == (request.num_committed, num_copied):
                self._run(request, promotion)
                for table, slots in zip(request.tables, own, strict=True):
                    table.extend(slots)
            else:
                self._cache.release(own)
                request.tables = []
                self._start(request)
                lost.append(request)
        return lost

    def computed(self, work: Sequence[Work]) -> None:
        """The step's tokens are in their slots: name the blocks that are full now."""
        for item in work:
            request = item.request
            request.num_computed += item.num_tokens
            if request.num_computed // self._cache.block_size > request.num_committed // self._cache.block_size:
                request.chain.extend(request.token_ids)
                boundaries = [len(request.prompt_token_ids) - 1]
                if request.junction is not None:
                    boundaries.append(request.junction)
                self._cache.commit(
                    request.tables, request.chain, request.num_committed, request.num_computed, boundaries
                )
                request.num_committed = request.num_computed

    def hurry(self, request: Request, priority: int) -> None:
        """Give a request that has not finished another priority; a waiting one goes behind all that have it."""
        is_waiting = request in self.waiting
        if is_waiting:
            self.waiting.remove(request)
        request.options = replace(request.options, priority=priority)
        if is_waiting:
            self.waiting.add(request)

    def retire(self, request: Request) -> None:
        """The request has finished: its blocks stay cached, its leases end."""
        self.running.remove(request)
        self._release(request)

    def _let_in(self, step: list[Work], budget: int, before: float = math.inf) -> int:
        """Admit whose turn it is, those more urgent than *before*; what is left of the budget."""
        while budget > 0 and self.waiting and self.waiting.first.options.priority < before:
            request = self._next()
            if request is None or request.options.priority >= before or not self._admit(request, step):
                break
            budget -= self._add_work(request, budget, step)
        return budget

    def _next(self) -> Request | None:
        """Whose turn it is: the first in the queue that does not wait for another's prefill."""
        prefilling = [request for request in (*self.running, *self.promoting) if not request.is_decoding]
        for request in islice(self.waiting, self._max_running):
            if not self._shared_prefill.serves(request, prefilling):
                return request
            request.hit = None  # it will have more when its turn comes
        return None

    def _admit(self, request: Request, step: list[Work]) -> bool:
        """Let the request in unless it would probably push out a running one that is as urgent. Alone it may always
        start."""
        if not self._may_one_more_run and not self._give_way(request, step):
            request.load_until = None
            return False
        if request.hit is None or self._clock() >= request.hit_until:
            request.hit, request.hit_until = self._lookup(request), self._clock() + HIT_LASTS_S
        hit = request.hit
        while not self._demand.fits(request, hit, [*self.running, *self.promoting]):
            if not self._give_way(request, step):
                request.load_until = None
                return False
        if request.load_until is None:
            request.load_until = self._clock() + self._timeout_s
        if not self._room_wait.is_over(request, self._cache.make_room(hit)):
            return False
        request.hit = None
        self.waiting.remove(request)
        request.junction = self._cache.junction(hit)
        if hit.start and self._cache.on_device(hit).num_tokens >= hit.start:
            hit = replace(hit, start=0)  # what was to be computed has come to the device meanwhile
        if hit.start:
            self._split(request, hit)
        else:
            self._park(request, self._cache.promote(hit, self._left_s(request)))
        if self._look_ahead is not None:
            self._look_ahead.forget(request)  # the promotion has its own leases now
        return True

    @property
    def _may_one_more_run(self) -> bool:
        return len(self.running) + len(self.promoting) < self._max_running

    def _give_way(self, request: Request, step: list[Work]) -> bool:
        """Send a less urgent request back to the queue; False if none runs."""
        victim = self._victim()
        if victim is None or victim.options.priority <= request.options.priority:
            return False
        step[:] = [work for work in step if work.request is not victim]
        self._preempt(victim)
        return True

    def _lookup(self, request: Request) -> Hit:
        request.chain.extend(request.token_ids)
        if not request.options.reads_cache:
            return self._cache.no_hit(request.chain, len(request.token_ids))
        hit = self._cache.lookup(request.chain, len(request.token_ids))
        if request.options.max_load_tokens is not None:
            hit = self._cache.loading_at_most(hit, request.options.max_load_tokens)
        return self._cache.worth_loading(hit, len(request.token_ids), self._busy_s())

    def _busy_s(self) -> float:
        """How long the device will compute the prompts that have been let in, as far as that is known."""
        if self._planner is None:
            return 0.0
        seconds = self._planner.compute_seconds
        busy_s = sum(seconds(r.num_computed, _left(r)) for r in self.running if not r.is_decoding)
        for request in self.promoting:
            if request.promotion is not None:
                depth = request.promotion.num_tokens
                busy_s += seconds(depth, len(request.token_ids) - depth)
        return busy_s

    def _split(self, request: Request, hit: Hit) -> None:
        """Begin with what is on the device of a hit, and compute what comes before the rest while that is loaded."""
        front = self._cache.promote(self._cache.on_device(hit))
        assert front.done, "what is on the device has to be waited for"
        request.promotion = self._cache.promote(hit, self._left_s(request))
        request.tables = front.tables
        request.num_committed = request.num_computed = front.num_tokens
        self.running.append(request)

    def _left_s(self, request: Request) -> float:
        """Until the request starts with what has come."""
        return self._timeout_s if request.load_until is None else max(0.0, request.load_until - self._clock())

    def _rejoin(self, request: Request, rest: Promotion) -> None:
        """The front is computed and the rest loaded, as much of it as arrived: its leases are the request's."""
        for table, group, loaded in zip(request.tables, self._cache.groups, rest.tables, strict=True):
            table.extend(loaded[rest.start // group.block_size :])
        self._has(request, rest)

    def _park(self, request: Request, promotion: Promotion) -> None:
        request.promotion = promotion
        request.num_promotions += 1
        if promotion.done:
            self._start(request)
        else:
            self.promoting.append(request)

    def _start(self, request: Request) -> None:
        """The request's prefix is on the device, as much of it as arrived: it can run."""
        promotion = request.promotion
        assert promotion is not None, "a request starts after its promotion"
        if promotion.why_no_more in CUT_SHORT and request.num_promotions < MAX_PROMOTIONS:
            hit = replace(self._lookup(request), start=0)  # what has arrived is on the device: there is no front
            if hit.num_tokens > promotion.num_tokens:  # windowed layers may resume at a place between
                again = self._cache.promote(hit, self._left_s(request))
                again.continues(promotion)
                self._cache.cancel(promotion)
                self._park(request, again)
                return
        self._run(request, promotion)

    def _run(self, request: Request, promotion: Promotion) -> None:
        """The promotion's leases are the request's."""
        request.tables = promotion.tables
        self._has(request, promotion)
        self.running.append(request)

    def _has(self, request: Request, promotion: Promotion) -> None:
        """The promotion's prefix is in the request's tables."""
        request.promotion = request.load_until = None
        request.num_promotions = 0
        request.num_committed = promotion.num_tokens
        request.num_computed = promotion.num_tokens + promotion.num_copied
        if request.options.reads_cache:
            count = self.hit_ratio.admitted if request.tokens is None else self.hit_ratio.readmitted
            count(len(request.token_ids), request.num_computed - promotion.num_computed)
        if request.tokens is None:
            request.tokens = promotion.balance(len(request.prompt_token_ids))
            self.admitted_tokens = self.admitted_tokens.plus(request.tokens)

    def _begin_early(self, step: list[Work]) -> None:
        """There is nothing else to compute: begin with a prompt whose prefix is arriving layer by layer.

        The promotion keeps its leases; those on the blocks to compute are the request's.
        """
        for request in self.promoting:
            promotion = request.promotion
            if promotion is None or promotion.gate is None:
                continue
            num_tokens = len(request.token_ids) - promotion.num_tokens - promotion.num_copied
            num_tokens = min(num_tokens, self._config.prefill_chunk, self._config.token_budget)
            end = promotion.num_tokens + promotion.num_copied + num_tokens
            pairs = zip(self._cache.groups, promotion.tables, strict=True)
            slots = self._cache.allocate([-(-end // group.block_size) - len(table) for group, table in pairs])
            if slots is None:
                continue
            request.tables = [there + own for there, own in zip(promotion.tables, slots, strict=True)]
            request.num_committed = promotion.num_tokens
            request.num_computed = promotion.num_tokens + promotion.num_copied
            step.append(Work(request, num_tokens))
            return

    def _add_work(self, request: Request, budget: int, step: list[Work]) -> int:
        """Give the request tokens to compute, if it still runs and finds slots; how many."""
        if budget <= 0 or request not in self.running:
            return 0
        num_tokens = min(_left(request), self._config.prefill_chunk, budget)
        if not num_tokens or not self._lease_slots(request, request.num_computed + num_tokens, step):
            return 0
        step.append(Work(request, num_tokens))
        return num_tokens

    def _lease_slots(self, request: Request, num_tokens: int, step: list[Work]) -> bool:
        """Extend the request's tables to *num_tokens*, preempting younger requests if slots run out."""
        self._cache.forget_read(request.tables, request.num_computed)
        groups = self._cache.groups
        missing = [-(-num_tokens // group.block_size) - len(t) for group, t in zip(groups, request.tables, strict=True)]
        if not any(missing):
            return True
        while (slots := self._cache.allocate(missing)) is None:
            victim = self._victim()
            if victim is None or victim is request:
                return False
            step[:] = [work for work in step if work.request is not victim]
            self._preempt(victim)
        for table, new in zip(request.tables, slots, strict=True):
            table.extend(new)
        return True

    def _victim(self) -> Request | None:
        """Who has to give way: of the least urgent that run, the youngest."""
        return max(reversed(self.running), key=_priority, default=None)

    def _preempt(self, request: Request) -> None:
        """Back to the queue. Its blocks stay cached, go down as all do, and come up again with its next turn."""
        self.running.remove(request)
        self._release(request)
        request.num_computed = request.num_committed = 0
        self.waiting.add_again(request)

    def _leases_besides_promotion(self, request: Request) -> Tables:
        """Of a request that began early: the tables' slots that are its own already."""
        num_copied = request.num_computed - request.num_committed
        return [
            table[request.num_committed // group.block_size + bool(num_copied) :]
            for table, group in zip(request.tables, self._cache.groups, strict=True)
        ]

    def _release(self, request: Request) -> None:
        if request.tables and request.promotion is not None and not request.split:  # a step that began early has failed
            self._cache.release(self._leases_besides_promotion(request))
            request.tables = []
        if request.promotion is not None:
            self._cache.cancel(request.promotion)
            request.promotion = None
        if request.tables:
            self._cache.commit_tail(request.tables, request.chain, request.num_computed)
            self._cache.release(request.tables)
        request.tables = []


def _priority(request: Request) -> int:
    return request.options.priority


def _left(request: Request) -> int:
    """Tokens that the request can compute now: of a split hit not those that are being loaded."""
    return max(0, request.split.start - request.num_computed) if request.split else request.num_to_compute
