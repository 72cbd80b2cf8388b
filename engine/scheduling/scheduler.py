"""The scheduler: it chooses which tokens of which requests the next step computes, and leases their slots."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvtier.engine.config import SchedulerConfig
from kvtier.engine.scheduling.block_tables import extend_table, num_new_slots
from kvtier.engine.scheduling.loading import COMING, WAITING, Loading, LoadingContext, LoadingState
from kvtier.engine.scheduling.look_ahead import LookAhead
from kvtier.engine.scheduling.request import FinishReason, Request
from kvtier.engine.scheduling.slot_demand import SlotDemand
from kvtier.engine.scheduling.trail import Trails
from kvtier.engine.scheduling.waiting_queue import WaitingQueue
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.hit_ratio import HitRatio
from kvtier.tiers.lower.breaker import CircuitBreaker
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.up.load_planner import LoadPlanner
from kvtier.tiers.up.promotion import Hit
from kvtier.transfer.layer_gate import LayerGate


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one request to compute in a step. Their slots are in the request's tables."""

    request: Request
    num_tokens: int

    @property
    def gate(self) -> LayerGate | None:
        """Gate with which the step waits for each layer of a prefix that is still being loaded; else None."""
        return None if self.request.loading is None else self.request.loading.gate

    @property
    def scored(self) -> range:
        """Positions that this work computes and whose logits are needed for the prompt's logprobs; may be empty."""
        scores, start = self.request.scores, self.request.num_computed
        return range(0) if scores is None else scores.wanted(start, start + self.num_tokens)


class Scheduler:
    """A continuous-batching scheduler: each step gets decodes first, then prefill chunks, then new requests.

    A step computes at most `token_budget` tokens. While the cached prefix of a request is being loaded, the request is
    parked, and other requests overtake it. When slots run out, or a more urgent request needs them, a running request
    is preempted: the one that started last among the least urgent. It returns to the queue. Its blocks stay cached and
    may be spilled to lower tiers. Owned by the engine's thread.
    """

    def __init__(
        self,
        cache: TieredCache,
        config: SchedulerConfig,
        load_timeout_s: float,
        planner: LoadPlanner | None = None,
        clock: Callable[[], float] = time.monotonic,
        look_ahead: LookAhead | None = None,
        trails: Trails | None = None,
        max_scored: int = 1 << 30,
    ) -> None:
        """Create a scheduler without requests.

        A load may take *load_timeout_s* seconds, including the wait for room on the device. Then the request starts
        with the blocks that have arrived. In *trails*, the scheduler records for each request from which tiers the
        blocks of its prompt came. The caller must remove these records with `Trails.end`. *max_scored* is the maximum
        number of tokens per step for which prompt logprobs are computed.
        """
        self.waiting = WaitingQueue()
        self.promoting: list[Request] = []
        self.running: list[Request] = []
        self.admitted_tokens = TokenBalance()  # where the tokens of all prompts admitted so far came from
        self.hit_ratio = HitRatio()
        self._cache = cache
        self._config = config
        self._around = LoadingContext(cache, clock, load_timeout_s, CircuitBreaker(clock), self._busy_s)
        self._planner = planner
        self._look_ahead = look_ahead
        self._trails = Trails() if trails is None else trails
        self._max_scored = max_scored
        self._asking: Loading | None = None  # the loading that waits for room, since this step or the previous one
        self._max_running = min(config.max_running, config.token_budget)  # so that every request can decode in a step
        self._has_states = any(group.keeps_states for group in cache.groups)
        self._shared_prefill = SharedPrefill(config.prefill_chunk, self._has_states)
        self._demand = SlotDemand(cache, config.prefill_chunk)
        self._num_slots = cache.free_slots()  # all slots, because nothing is leased yet

    @property
    def has_work(self) -> bool:
        """True if any request is unfinished."""
        return bool(self.waiting or self.promoting or self.running)

    def expected_hit(self, chain: BlockChain, num_tokens: int) -> Hit:
        """Return the hit that a request with this prompt would load if it started now. Has no side effects."""
        hit = self._cache.lookup(chain, num_tokens)
        return self._cache.plans.worth_loading(hit, num_tokens, self._busy_s(None))

    def add(self, request: Request) -> None:
        """Queue the request. Raises ValueError if the device is too small for it, or if the queue is full."""
        num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        needed = self._demand.of(num_tokens)
        for blocks, num_slots in zip(needed, self._num_slots, strict=True):
            if blocks > num_slots:
                raise ValueError(
                    f"prompt of {len(request.prompt_token_ids)} tokens plus {request.sampling.max_tokens} to generate "
                    f"need {blocks} blocks, the device holds {num_slots}; raise device.capacity or shorten the prompt"
                )
        if len(self.waiting) >= self._config.max_waiting:
            raise ValueError(f"queue full: {len(self.waiting)} requests wait already; raise scheduler.max_waiting")
        request.loading = Loading(request, self._around)
        request.loading.inquire()
        self.waiting.add(request)

    def abort(self, request: Request) -> None:
        """End the request, whether it waits, loads or runs, and release its leases."""
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
        """Choose the next step's work and lease its slots. The result is empty while all requests have to wait."""
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
        # A request that asked for room in the last step, but not in this one, stops waiting for room. Otherwise its
        # load's time limit would run while another request asks for room.
        if asked is not None and asked is not self._asking:
            asked.wait_turn()
        if self._look_ahead is not None and self.waiting:
            self._look_ahead.look(self.waiting)
        if not step:
            self._begin_early(step)
        return step

    def settle(self, work: Sequence[Work]) -> list[Request]:
        """Wait briefly for the prefixes that were still being loaded while the step was computed.

        Returns:
            The requests whose prefix did not arrive as expected. The tokens that the step computed for them are
            discarded.
        """
        lost = []
        for request in [item.request for item in work if item.gate is not None]:
            loading = _loading_of(request)
            if not loading.settle():
                lost.append(request)
            if loading.state is not LoadingState.LATE:
                self.promoting.remove(request)
                self._place(request)
        return lost

    def on_computed(self, work: Sequence[Work]) -> None:
        """Count the step's tokens as computed, and add the blocks that are now full to the cache."""
        for item in work:
            request = item.request
            request.num_computed += item.num_tokens
            if request.num_computed // self._cache.block_size > request.num_committed // self._cache.block_size:
                request.chain.extend(request.token_ids)
                self._cache.commit(
                    request.tables, request.chain, request.num_committed, request.num_computed, request.boundaries
                )
                request.num_committed = request.num_computed

    def set_priority(self, request: Request, priority: int) -> None:
        """Change the priority of an unfinished request. A waiting one moves behind all others of its new priority."""
        is_waiting = request in self.waiting
        if is_waiting:
            self.waiting.remove(request)
        request.options = replace(request.options, priority=priority)
        if is_waiting:
            self.waiting.add(request)

    def retire(self, request: Request) -> None:
        """Release the leases of a finished request; its blocks stay cached."""
        self.running.remove(request)
        self._release(request)

    def check(self) -> None:
        """Raise AssertionError if a request is in the wrong queue, or the state of its `Loading` is invalid."""
        for requests, states in ((self.waiting, WAITING), (self.promoting, COMING - {LoadingState.SPLIT})):
            for request in requests:
                assert _loading_of(request).state in states, (
                    f"a request whose loading is {_loading_of(request).state} is in the wrong queue"
                )
                _loading_of(request).check()
        for request in self.running:
            if request.loading is not None:
                assert request.loading.state is LoadingState.SPLIT, (
                    f"a running request's loading is {request.loading.state}"
                )
                request.loading.check()

    def _let_in(self, step: list[Work], budget: int, before: float = math.inf) -> int:
        """Admit waiting requests with a priority below *before*, in order, and return the rest of the budget."""
        while budget > 0 and self.waiting and self.waiting.first.options.priority < before:
            request = self._next_request()
            if request is None or request.options.priority >= before or not self._admit(request, step):
                break
            budget -= self._add_work(request, budget, step)
        return budget

    def _next_request(self) -> Request | None:
        """Return the first waiting request that can start now.

        Skip requests that wait for a slow tier's answer. Also skip a request if another one is computing a prefix that
        both share. The hit of the skipped request is discarded, because a later lookup finds more blocks.
        """
        prefilling = [request for request in (*self.running, *self.promoting) if not request.is_decoding]
        for request in islice(self.waiting, self._max_running):
            if _loading_of(request).is_asking:
                continue
            other = self._shared_prefill.awaited(request, prefilling)
            if other is None:
                return request
            if self._has_states:
                other.junctions.add(num_common_tokens(request, other))  # so that this request can resume there
            _loading_of(request).defer()
        return None

    def _admit(self, request: Request, step: list[Work]) -> bool:
        """Start to load the request's cached prefix. Return False if the request has to wait instead.

        It waits while too many requests run, while too few device slots are free, or while dirty blocks are copied down
        to make room for the prefix. In the first two cases, it waits only if no less urgent request can be preempted.
        """
        loading = _loading_of(request)
        may_run = self._may_one_more_run or self._give_way(request, step)
        if not may_run or not self._find_slots(request, loading, step):
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
            self._look_ahead.forget(request)  # the promotion holds its own leases now
        return True

    @property
    def _may_one_more_run(self) -> bool:
        return len(self.running) + len(self.promoting) < self._max_running

    def _find_slots(self, request: Request, loading: Loading, step: list[Work]) -> bool:
        """Return whether there are device slots for the request, if necessary after preempting less urgent requests.

        If the last hit does not fit and no request can be preempted, return False without a new lookup. A lookup in
        each step would be too slow: it takes 36 ms for 8,192 blocks on disk.
        """
        last_hit = loading.last_hit
        if last_hit is not None and not self._has_slots(request, last_hit) and self._less_urgent(request) is None:
            return False
        hit = loading.look_up()
        while not self._has_slots(request, hit):
            if not self._give_way(request, step):
                return False
        return True

    def _has_slots(self, request: Request, hit: Hit) -> bool:
        return self._demand.fits(request, hit, [*self.running, *self.promoting])

    def _give_way(self, request: Request, step: list[Work]) -> bool:
        """Preempt a less urgent request; return False if none is running."""
        victim = self._less_urgent(request)
        if victim is None:
            return False
        step[:] = [work for work in step if work.request is not victim]
        self._preempt(victim)
        return True

    def _less_urgent(self, request: Request) -> Request | None:
        """Return the next running request to preempt, if it is less urgent than *request*, else None."""
        victim = self._victim()
        return None if victim is None or victim.options.priority <= request.options.priority else victim

    def _busy_s(self, besides: Request | None) -> float:
        """Return the estimated seconds of prefill left for all admitted requests except *besides*."""
        if self._planner is None:
            return 0.0
        seconds = self._planner.compute_seconds
        busy_s = sum(seconds(r.num_computed, _num_left(r)) for r in self.running if not r.is_decoding)
        for request in self.promoting:
            if request is not besides:
                depth = _loading_of(request).num_tokens
                busy_s += seconds(depth, len(request.token_ids) - depth)
        return busy_s

    def _take_in(self) -> None:
        """Hand over the cached prefixes that have arrived on the device, so that their requests run from now on."""
        for request in [parked for parked in self.promoting if _loading_of(parked).has_come]:
            _loading_of(request).take_in()
            self.promoting.remove(request)
            self._place(request)
        for request in self.running:
            if request.loading is not None and request.loading.has_come:
                request.loading.take_in()
                self._end_loading(request)

    def _place(self, request: Request) -> None:
        """Put a request into the queue that matches its loading's state."""
        match _loading_of(request).state:
            case LoadingState.LOADED:
                self._end_loading(request)
                self.running.append(request)
            case LoadingState.SPLIT:
                self.running.append(request)
            case _:
                self.promoting.append(request)

    def _end_loading(self, request: Request) -> None:
        """Record that the request's cached prefix is on the device, and count which tiers its tokens came from."""
        loading, request.loading = _loading_of(request), None
        request.timeline.on_loaded(self._around.clock())
        if request.reads_cache:
            count = self.hit_ratio.on_admitted if request.tokens is None else self.hit_ratio.on_readmitted
            count(len(request.token_ids), loading.num_hit_tokens)
        if request.tokens is None:
            request.tokens = loading.balance()
            self._trails.begin(request, loading.trail())
            self.admitted_tokens = self.admitted_tokens.plus(request.tokens)

    def _begin_early(self, step: list[Work]) -> None:
        """Fill an empty step with work on a prompt whose prefix is still arriving layer by layer."""
        max_tokens = min(self._config.prefill_chunk, self._config.token_budget)
        for request in self.promoting:
            limit = max_tokens if request.scores is None else min(max_tokens, self._max_scored)
            if num_tokens := _loading_of(request).begin_early(limit):
                step.append(Work(request, num_tokens))
                return

    def _add_work(self, request: Request, budget: int, step: list[Work]) -> int:
        """Add work for the request if it still runs and finds slots; return the number of tokens added."""
        if budget <= 0 or request not in self.running:
            return 0
        limit = self._within_chunk(request, min(_num_left(request), self._config.prefill_chunk, budget))
        num_tokens = self._within_scored(request, limit, step)
        if not num_tokens or not self._lease_slots(request, request.num_computed + num_tokens, step):
            return 0
        step.append(Work(request, num_tokens))
        return num_tokens

    def _within_chunk(self, request: Request, num_tokens: int) -> int:
        """Return *num_tokens*, reduced so that the request's chunk ends where a recurrent state is to be kept.

        A chunk that ends before the known tokens do ends with a full block, so that a preempted request can resume.
        """
        if not self._has_states:
            return num_tokens
        start, block_size = request.num_computed, self._cache.block_size
        if num_tokens < request.num_to_compute:
            num_tokens = max((start + num_tokens) // block_size * block_size - start, 0) or num_tokens
        end = self._cache.chunk_end(start, request.boundaries)
        return num_tokens if end is None else min(num_tokens, end - start)

    def _within_scored(self, request: Request, num_tokens: int, step: Sequence[Work]) -> int:
        """Return *num_tokens*, reduced so that the step computes at most `_max_scored` prompt logprobs."""
        scored = Work(request, num_tokens).scored
        left = self._max_scored - sum(len(work.scored) for work in step)
        return num_tokens if len(scored) <= left else scored.start + left - request.num_computed

    def _lease_slots(self, request: Request, num_tokens: int, step: list[Work]) -> bool:
        """Extend the request's tables to *num_tokens* tokens, preempting requests if slots run out.

        Returns False if this request itself is the next one to preempt.
        """
        groups, tables, num_computed = self._cache.groups, request.tables, request.num_computed
        self._cache.forget_read(tables, num_computed)
        missing = [
            num_new_slots(group, table, num_computed, num_tokens) for group, table in zip(groups, tables, strict=True)
        ]
        new_slots = self._take_slots(request, missing, step) if any(missing) else [()] * len(groups)
        if new_slots is None:
            return False
        for group, table, new in zip(groups, tables, new_slots, strict=True):
            extend_table(group, table, new, num_computed, num_tokens)
        return True

    def _take_slots(
        self, request: Request, num_slots: Sequence[int], step: list[Work]
    ) -> Sequence[Sequence[int]] | None:
        """Lease new slots for the request, preempting requests if slots run out.

        Returns None if this request itself is the next one to preempt.
        """
        while (slots := self._cache.allocate(num_slots)) is None:
            victim = self._victim()
            if victim is None or victim is request:
                return None
            step[:] = [work for work in step if work.request is not victim]
            self._preempt(victim)
        return slots

    def _victim(self) -> Request | None:
        """Return the running request to preempt first: the one that started last among the least urgent."""
        return max(reversed(self.running), key=_priority, default=None)

    def _preempt(self, request: Request) -> None:
        """Return a running request to the queue. Its blocks stay cached, and are loaded again when it restarts."""
        self.running.remove(request)
        self._release(request)
        request.timeline.num_preempted += 1
        request.num_computed = request.num_committed = 0
        request.loading = Loading(request, self._around)
        self.waiting.add_again(request)

    def _release(self, request: Request) -> None:
        if request.loading is not None:
            request.loading.give_up()
            request.loading = None
        if request.tables:
            self._cache.commit_state(request.tables, request.chain, request.num_committed)
            self._cache.commit_tail(request.tables, request.chain, request.num_computed)
            self._cache.release(request.tables)
        request.tables = []


def _priority(request: Request) -> int:
    return request.options.priority


def _num_left(request: Request) -> int:
    """Return how many tokens the request can compute now: while blocks are being loaded, only those before them."""
    return request.num_to_compute if request.loading is None else request.loading.num_to_compute


def _loading_of(request: Request) -> Loading:
    assert request.loading is not None, "the request has no loading, so it already has its prefix"
    return request.loading


class SharedPrefill:
    """A policy that lets requests wait while another request computes a prefix that they share.

    Example: ten questions about the same new document arrive together. One request computes the document chunk by chunk
    while the others wait. When less than a chunk of the document is left, every request computes the rest itself. With
    recurrent states they wait for the document's end, because a state is kept there, and else an interval earlier.
    """

    def __init__(self, min_tokens: int, has_states: bool = False) -> None:
        """Create the policy. A request waits only if that saves it the computation of *min_tokens* tokens or more."""
        self._min_tokens = min_tokens
        self._has_states = has_states

    def awaited(self, request: Request, prefilling: Collection[Request]) -> Request | None:
        """Return the one of the *prefilling* requests that will soon have computed a prefix that this request needs.

        Returns None if the request need not wait. Less urgent requests do not count, because they may be preempted.
        Requests with a limit on their loads do not count either: they recompute blocks that this request may be able to
        load from the cache.
        """
        if not request.reads_cache:
            return None
        usable = (
            other
            for other in prefilling
            if other.reads_cache and other.options.takes_all_hits and other.options.priority <= request.options.priority
        )
        return next((other for other in usable if self._num_tokens_saved(request, other) >= self._min_tokens), None)

    def _num_tokens_saved(self, request: Request, other: Request) -> int:
        """Return how many tokens of the common prefix this request would have to compute if it did not wait.

        They are those that the other request has not computed yet. With recurrent states they are all that it computes
        itself, as long as it has not reached the prefix's end, where a state is kept.
        """
        there = other.num_computed if other.loading is None else other.loading.num_tokens
        common = num_common_tokens(request, other)
        if not self._has_states or common <= there:
            return common - there
        num_found = there if other.tokens is None else other.tokens.num_tokens - other.tokens.recomputed
        return common - min(num_found, there)


def num_common_tokens(one: Request, other: Request) -> int:
    """Return the length of the common prefix of two prompts, in tokens of full blocks.

    A block's name identifies everything before it, so a binary search finds the last common block. Most pairs of
    prompts have no common block, which takes one comparison.
    """
    names, others = one.chain.names, other.chain.names
    low, high = 0, min(len(names), len(others))
    if not high or names[0] != others[0]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if names[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low * one.chain.block_size
