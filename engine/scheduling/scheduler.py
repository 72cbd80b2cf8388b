"""Scheduler: which tokens to compute in the next step, for whom, and in which slots."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvtier.engine.config import SchedulerConfig
from kvtier.engine.scheduling.loading import COMING, WAITING, Loading, State, Surroundings
from kvtier.engine.scheduling.look_ahead import LookAhead
from kvtier.engine.scheduling.request import FinishReason, Request
from kvtier.engine.scheduling.shared_prefill import SharedPrefill
from kvtier.engine.scheduling.slot_demand import SlotDemand
from kvtier.engine.scheduling.waiting_queue import WaitingQueue
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.hit_ratio import HitRatio
from kvtier.tiers.lower.breaker import CircuitBreaker
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.up.load_planner import LoadPlanner
from kvtier.transfer.layer_gate import LayerGate


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one request to compute in this step; their slots are in its tables."""

    request: Request
    num_tokens: int

    @property
    def gate(self) -> LayerGate | None:
        """What to wait for at each layer, if the request's prefix is still arriving."""
        return None if self.request.loading is None else self.request.loading.gate


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
        self._around = Surroundings(cache, clock, load_timeout_s, CircuitBreaker(clock), self._busy_s)
        self._planner = planner
        self._look_ahead = look_ahead
        self._asking: Loading | None = None  # for room, in this step or the last
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
        request.loading = Loading(request, self._around)
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
        self._take_in()
        asked, self._asking = self._asking, None
        step: list[Work] = []
        budget = self._config.token_budget
        by_priority = sorted(self.running, key=_priority)
        for request in [r for r in by_priority if r.is_decoding]:
            budget -= self._add_work(request, budget, step)
        for request in [r for r in by_priority if not r.is_decoding]:
            budget = self._let_in(step, budget, before=request.options.priority)
            budget -= self._add_work(request, budget, step)
        self._let_in(step, budget)
        if asked is not None and asked is not self._asking:  # its time would pass while others are asked
            asked.wait_turn()
        if self._look_ahead is not None and self.waiting:
            self._look_ahead.look(self.waiting)
        if not step:
            self._begin_early(step)
        return step

    def settle(self, work: Sequence[Work]) -> list[Request]:
        """Wait a moment for the prefixes that were arriving while the step was computed; the requests whose did not
        arrive as expected. What was computed for these counts for nothing."""
        lost = []
        for request in [item.request for item in work if item.gate is not None]:
            loading = _of(request)
            if not loading.settle():
                lost.append(request)
            if loading.state is not State.LATE:
                self.promoting.remove(request)
                self._place(request)
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

    def check(self) -> None:
        """Raise AssertionError if a request stands elsewhere than its loading says, or that is not what it says."""
        for requests, states in ((self.waiting, WAITING), (self.promoting, COMING - {State.SPLIT})):
            for request in requests:
                assert _of(request).state in states, f"a loading that is {_of(request).state} stands in the wrong queue"
                _of(request).check()
        for request in self.running:
            if request.loading is not None:
                assert request.loading.state is State.SPLIT, f"runs with a loading that is {request.loading.state}"
                request.loading.check()

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
            _of(request).stand_back()
        return None

    def _admit(self, request: Request, step: list[Work]) -> bool:
        """Let the request in unless it would probably push out a running one that is as urgent. Alone it may always
        start."""
        loading = _of(request)
        if not self._may_one_more_run and not self._give_way(request, step):
            loading.wait_turn()
            return False
        hit = loading.look_up()
        while not self._demand.fits(request, hit, [*self.running, *self.promoting]):
            if not self._give_way(request, step):
                loading.wait_turn()
                return False
        if self._asking is not None and self._asking is not loading:
            self._asking.wait_turn()
        self._asking = None
        if not loading.ask_for_room():
            self._asking = loading
            return False
        self.waiting.remove(request)
        loading.begin()
        self._place(request)
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

    def _busy_s(self, besides: Request) -> float:
        """How long the device will compute the other prompts that have been let in, as far as that is known."""
        if self._planner is None:
            return 0.0
        seconds = self._planner.compute_seconds
        busy_s = sum(seconds(r.num_computed, _left(r)) for r in self.running if not r.is_decoding)
        for request in self.promoting:
            if request is not besides:
                depth = _of(request).num_tokens
                busy_s += seconds(depth, len(request.token_ids) - depth)
        return busy_s

    def _take_in(self) -> None:
        """Go on with the requests whose prefix has come."""
        for request in [parked for parked in self.promoting if _of(parked).has_come]:
            _of(request).take_in()
            self.promoting.remove(request)
            self._place(request)
        for request in self.running:
            if request.loading is not None and request.loading.has_come:
                request.loading.take_in()
                self._admitted(request)

    def _place(self, request: Request) -> None:
        """A request whose loading has gone on stands where that belongs."""
        match _of(request).state:
            case State.LOADED:
                self._admitted(request)
                self.running.append(request)
            case State.SPLIT:
                self.running.append(request)
            case _:
                self.promoting.append(request)

    def _admitted(self, request: Request) -> None:
        """The request has its prefix: count where that came from."""
        loading, request.loading = _of(request), None
        if request.options.reads_cache:
            count = self.hit_ratio.on_admitted if request.tokens is None else self.hit_ratio.on_readmitted
            count(len(request.token_ids), loading.num_hit_tokens)
        if request.tokens is None:
            request.tokens = loading.balance()
            self.admitted_tokens = self.admitted_tokens.plus(request.tokens)

    def _begin_early(self, step: list[Work]) -> None:
        """There is nothing else to compute: begin with a prompt whose prefix is arriving layer by layer."""
        most_tokens = min(self._config.prefill_chunk, self._config.token_budget)
        for request in self.promoting:
            if num_tokens := _of(request).begin_early(most_tokens):
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
        request.loading = Loading(request, self._around)
        self.waiting.add_again(request)

    def _release(self, request: Request) -> None:
        if request.loading is not None:
            request.loading.give_up()
            request.loading = None
        if request.tables:
            self._cache.commit_tail(request.tables, request.chain, request.num_computed)
            self._cache.release(request.tables)
        request.tables = []


def _priority(request: Request) -> int:
    return request.options.priority


def _left(request: Request) -> int:
    """Tokens that the request can compute now: of a split hit not those that are being loaded."""
    return request.num_to_compute if request.loading is None else request.loading.num_to_compute


def _of(request: Request) -> Loading:
    """The loading of a request that waits or is being promoted."""
    assert request.loading is not None, "a request that has its prefix already"
    return request.loading
