"""Loading: brings one request's cached prefix to the device, from the first lookup to the last copied block."""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from kvtier.engine.scheduling.slot_demand import num_leased
from kvtier.engine.scheduling.timeline import Stage
from kvtier.engine.scheduling.trail import Trail
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.lower.breaker import Attempt, CircuitBreaker
from kvtier.tiers.lower.lower_tiers import NOTHING_TO_ASK, Inquiry
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.up.promotion import Hit, Promotion, Tables
from kvtier.transfer.layer_gate import LayerGate

if TYPE_CHECKING:
    from kvtier.engine.scheduling.request import Request

MAX_PROMOTIONS = 3  # per request; if a bad block ends a promotion early, the next one loads the rest
# If a promotion ended early for one of these reasons, the rest of the prefix is looked up and promoted again.
CUT_SHORT = frozenset({Reason.CORRUPT, Reason.EVICTED_FROM_DISK, Reason.EVICTED_FROM_REMOTE})
ARRIVAL_POLL_S = 0.01
# An early step computes on the layers of a prefix that have arrived, while the others are still being copied. After the
# step, wait up to this long until all blocks are copied and verified. No request computes meanwhile.
SETTLE_S = 1.0
ROOM_SHARE = 0.5  # share of a load's time limit that may be spent waiting for room; the rest is for the load itself
HIT_LASTS_S = 0.05  # reuse a lookup result for this long: looking up 8,192 blocks on disk takes 36 ms


class LoadingState(StrEnum):
    """State of a `Loading`."""

    QUEUED = "queued"  # the hit has not been looked up, or was discarded
    FOUND = "found"  # the hit is known; the request waits for its turn and for slots
    ROOM = "room"  # dirty blocks are copied down to make room for the hit; the load's time limit runs
    PARKED = "parked"  # the hit is being promoted; the request computes nothing meanwhile
    EARLY = "early"  # a step computes on the layers of the hit that have arrived
    LATE = "late"  # the early step was discarded; the request is parked until all layers have arrived
    SPLIT = "split"  # the request computes the beginning of the hit while the rest is promoted
    LOADED = "loaded"  # the part of the hit that arrived is in the request's tables, which own the leases
    GIVEN_UP = "given up"  # the request has ended, or starts again from the queue; nothing is leased


NEXT_STATES = {
    LoadingState.QUEUED: {LoadingState.FOUND, LoadingState.GIVEN_UP},
    LoadingState.FOUND: {LoadingState.QUEUED, LoadingState.ROOM, LoadingState.GIVEN_UP},
    LoadingState.ROOM: {
        LoadingState.QUEUED,
        LoadingState.FOUND,
        LoadingState.PARKED,
        LoadingState.SPLIT,
        LoadingState.LOADED,
        LoadingState.GIVEN_UP,
    },
    LoadingState.PARKED: {LoadingState.PARKED, LoadingState.EARLY, LoadingState.LOADED, LoadingState.GIVEN_UP},
    LoadingState.EARLY: {LoadingState.PARKED, LoadingState.LATE, LoadingState.LOADED, LoadingState.GIVEN_UP},
    LoadingState.LATE: {LoadingState.PARKED, LoadingState.LOADED, LoadingState.GIVEN_UP},
    LoadingState.SPLIT: {LoadingState.LOADED, LoadingState.GIVEN_UP},
    LoadingState.LOADED: set(),
    LoadingState.GIVEN_UP: set(),
}
PROMOTE = {
    Tier.HOST: Stage.PROMOTE_HOST,
    Tier.DISK: Stage.PROMOTE_DISK,
    Tier.REMOTE: Stage.PROMOTE_REMOTE,
}
WAITING = frozenset({LoadingState.QUEUED, LoadingState.FOUND, LoadingState.ROOM})
COMING = frozenset({LoadingState.PARKED, LoadingState.EARLY, LoadingState.LATE, LoadingState.SPLIT})


@dataclass(frozen=True, slots=True)
class LoadingContext:
    """The cache, the clock and the limits shared by all loadings of one engine."""

    cache: TieredCache
    clock: Callable[[], float]
    max_s: float  # time limit of a load, from asking for room until the request starts with the blocks that arrived
    room: CircuitBreaker  # stops waits for room after a slow one, so that not every request holds up the queue
    busy_s: Callable[["Request"], float]  # how long the device will compute for requests other than the given one


@dataclass(frozen=True, slots=True)
class _Found:
    hit: Hit
    until: float  # when the hit must be looked up again


class Loading:
    """A state machine that brings the cached prefix of one request (its hit) to the device.

    A request is *queued* until its hit is looked up (*found*). Then it waits for *room*, that is, until dirty blocks
    that the hit would evict from the device are copied to host memory. Last, the missing blocks are promoted, which
    means copied to device slots. Meanwhile the request computes nothing (*parked*), except in two cases:

    - *split*: The request computes the beginning of the hit while the rest is promoted.
    - *early*: The blocks arrive layer by layer, and a step computes on the layers that are there. If blocks are still
      in flight shortly after the step, its results are discarded, and the request waits for these blocks (*late*).

    The scheduler calls the methods in this table. Owned by the engine's thread.

    | method         | state before         | state after                                                          |
    |----------------|----------------------|----------------------------------------------------------------------|
    | `look_up`      | queued, found        | found                                                                |
    |                | room                 | room                                                                 |
    | `defer`        | queued, found, room  | queued, because another request computes what this one needs         |
    | `wait_turn`    | room                 | found                                                                |
    | `ask_for_room` | found, room          | room                                                                 |
    | `begin`        | room                 | split for a split hit; loaded if all is on the device; else parked   |
    | `take_in`      | parked, late         | loaded; parked again if a block was corrupt or evicted meanwhile     |
    |                | split                | loaded, once the request has computed the beginning                  |
    | `begin_early`  | parked               | early, if layers arrive one by one and slots are free; else parked   |
    |                | late                 | late                                                                 |
    | `settle`       | early                | late if blocks are still in flight; else loaded or parked again      |
    | `give_up`      | any before loaded    | given up                                                             |

    The load leases slots from `begin` on. In state *loaded*, all of them belong to the request's block tables; in state
    *split*, only those of the hit's beginning. The scheduler releases the slots in these tables.
    """

    def __init__(self, request: "Request", around: LoadingContext) -> None:
        self.state = LoadingState.QUEUED
        self._request = request
        self._around = around
        self._cache = around.cache
        self._inquiry: Inquiry = NOTHING_TO_ASK
        self._found: _Found | None = None
        self._asked_at = 0.0  # when room was first asked for
        self._is_room_made = False  # whether copies down are making room for the hit
        self._begun_at = 0.0
        self._attempt: Attempt | None = None  # the breaker's attempt, while the request waits for room
        self._promotion: Promotion | None = None
        self._num_promotions = 0
        self._early_slots: Tables = []  # slots for a step that begins early

    # --- queries by the scheduler

    @property
    def last_hit(self) -> Hit | None:
        """Result of the last lookup, which may be outdated; None if there is none."""
        return None if self._found is None else self._found.hit

    @property
    def is_asking(self) -> bool:
        """True if a slow tier has not yet answered `inquire`. A lookup after the answer may find more blocks."""
        return not self._inquiry.is_done

    @property
    def has_come(self) -> bool:
        """True once each block that is being loaded has arrived or failed.

        In state *split*, the request must also have computed all tokens before these blocks.
        """
        promotion = self._promotion
        if promotion is None or not promotion.done:
            return False
        return self.state is not LoadingState.SPLIT or self._request.num_computed >= promotion.start

    @property
    def num_tokens(self) -> int:
        """Length in tokens of the prefix being loaded, including the blocks that are still in flight."""
        return self._coming.num_tokens

    @property
    def num_to_compute(self) -> int:
        """Number of tokens that the request has yet to compute before the first block that is being loaded; often 0."""
        return max(0, self._coming.start - self._request.num_computed)

    @property
    def gate(self) -> LayerGate | None:
        """Gate at which the current step waits for each layer of the prefix to arrive; None if it need not wait."""
        return self._coming.gate if self.state is LoadingState.EARLY else None

    def num_slots(self) -> list[int]:
        """Return for each attention group how many device slots are leased or reserved for the prefix."""
        promotion = self._coming
        kept = self._cache.num_to_come(promotion)
        return [num_leased(table) + to_come for table, to_come in zip(promotion.tables, kept, strict=True)]

    @property
    def num_hit_tokens(self) -> int:
        """Number of tokens that came from the cache. Valid once the prefix is loaded."""
        return self._coming.num_tokens + self._coming.num_copied - self._coming.num_computed

    def balance(self) -> TokenBalance:
        """Return how many of the prompt's tokens came from each tier. Valid once the prefix is loaded."""
        return self._coming.balance(len(self._request.prompt_token_ids))

    def trail(self) -> Trail:
        """Return the origin of each block of the prompt. Valid once the prefix is loaded."""
        promotion, request = self._coming, self._request
        num_names = len(request.prompt_token_ids) // promotion.chain.block_size
        return Trail(
            promotion.chain.block_size,
            promotion.chain.names[:num_names],
            bytes(promotion.depths[: promotion.num_blocks]),
            promotion.num_copied,
            promotion.misses.reasons,
            self._around.clock(),
            promotion.misses.num_lasting,
        )

    # --- events while the request waits

    def inquire(self) -> None:
        """Query slow tiers (for example the remote store) for the prompt's blocks; see `is_asking`."""
        self._expect({LoadingState.QUEUED})
        request = self._request
        if request.options.reads_cache:
            self._inquiry = self._cache.lookups.inquire(request.chain, len(request.token_ids))

    def look_up(self) -> Hit:
        """Return the request's hit, looking it up again if the last result is older than `HIT_LASTS_S`."""
        self._expect(WAITING)
        began_at = self._around.clock()
        if self._found is None or began_at >= self._found.until:
            hit, now = self._lookup(), self._around.clock()
            self._request.timeline.lookup_s += now - began_at
            self._found = _Found(hit, now + HIT_LASTS_S)
        if self.state is LoadingState.QUEUED:
            self._become(LoadingState.FOUND)
        return self._found.hit

    def defer(self) -> None:
        """Discard the hit, because another request is about to compute a prefix that both requests share."""
        self._expect(WAITING)
        if self.state is not LoadingState.QUEUED:
            self._withdraw()
            self._found = None
            self._become(LoadingState.QUEUED)

    def wait_turn(self) -> None:
        """Stop waiting for room (see `ask_for_room`), because slots are missing or another request goes first.

        The load's time limit starts anew with the next `ask_for_room`. In other states than *room*, do nothing.
        """
        if self.state is LoadingState.ROOM:
            self._withdraw()
            self._become(LoadingState.FOUND)

    def ask_for_room(self) -> bool:
        """Start to copy down the dirty blocks that the hit would evict, and return whether the load may begin.

        The load may begin once all these copies are done, or after waiting for `ROOM_SHARE` of its time limit. In the
        latter case, the loads of later requests do not wait at all for a while, so that slow copies do not hold up the
        queue. Call this in every step until it returns True, or call `wait_turn`.
        """
        assert self._found is not None, "room is asked for before the hit is looked up"
        clock, breaker = self._around.clock, self._around.room
        is_first = self.state is LoadingState.FOUND
        if is_first:
            self._become(LoadingState.ROOM)
            self._asked_at = clock()
            self._is_room_made = False
        self._expect({LoadingState.ROOM})
        if self._cache.make_room(self._found.hit):
            if self._attempt is not None:
                breaker.on_succeeded(self._attempt)
                self._attempt = None
            return True
        if is_first:
            self._attempt = breaker.begin()
        if self._attempt is None:
            return True
        self._is_room_made = True
        if clock() < self._asked_at + ROOM_SHARE * self._around.max_s:
            return False
        breaker.on_hung(self._attempt)
        self._attempt = None
        return True

    def begin(self) -> None:
        """Lease the hit's blocks that are on the device, and start to promote the others."""
        self._expect({LoadingState.ROOM})
        assert self._found is not None, "a load begins before its hit is looked up"
        hit, self._found = self._found.hit, None
        now = self._around.clock()
        if self._is_room_made:
            self._request.timeline.note(Stage.SPILL, self._asked_at, now)
        self._begun_at = now
        self._request.timeline.on_begun(now)
        self._withdraw()
        if (junction := self._cache.lookups.junction(hit)) is not None:
            self._request.junctions.add(junction)
        if hit.start and self._cache.plans.on_device(hit).num_tokens >= hit.start:
            hit = replace(hit, start=0)  # the tokens that were to be computed are on the device by now
        if hit.start:
            self._split(hit)
        else:
            self._promote(hit)

    # --- events while the hit is promoted

    def take_in(self) -> None:
        """Hand the loaded prefix over to the request. If a bad block cut it short, try to load the rest first."""
        assert self.has_come, "the prefix is still coming"
        if self.state is LoadingState.SPLIT:
            self._join()
        else:
            self._expect({LoadingState.PARKED, LoadingState.LATE})
            self._arrive()

    def begin_early(self, max_tokens: int) -> int:
        """Lease slots for an early step, which begins before all layers of the prefix have arrived.

        Returns how many tokens the step computes; 0 if no such step is possible, for example because no slots are free.
        """
        self._expect({LoadingState.PARKED, LoadingState.LATE})
        promotion = self._coming
        if self.state is LoadingState.LATE or promotion.gate is None:
            return 0
        request, start = self._request, promotion.num_tokens + promotion.num_copied
        num_tokens = min(len(request.token_ids) - start, max_tokens)
        pairs = zip(self._cache.groups, promotion.tables, strict=True)
        slots = self._cache.allocate(
            [-(-(start + num_tokens) // group.block_size) - len(table) for group, table in pairs]
        )
        if slots is None:
            return 0
        self._become(LoadingState.EARLY)
        self._early_slots = slots
        request.tables = [there + own for there, own in zip(promotion.tables, slots, strict=True)]
        request.num_committed, request.num_computed = promotion.num_tokens, start
        return num_tokens

    def settle(self) -> bool:
        """Wait briefly for the rest of the prefix, after a step that began before all of it had arrived.

        Return True if all its blocks have arrived and were verified. Otherwise, discard the tokens that the step
        computed; the request computes them again later.
        """
        self._expect({LoadingState.EARLY})
        request, promotion = self._request, self._coming
        give_up_at = self._around.clock() + SETTLE_S
        while not promotion.done and self._around.clock() < give_up_at:
            self._cache.wait(ARRIVAL_POLL_S)
        came = promotion.num_tokens, promotion.num_copied
        if promotion.done and came == (request.num_committed, request.num_computed - request.num_committed):
            request.tables = [there + own for there, own in zip(promotion.tables, self._early_slots, strict=True)]
            self._early_slots = []
            self._hand_over()
            return True
        self._drop_early()
        if promotion.done:
            self._arrive()
        else:
            self._become(LoadingState.LATE)
        return False

    def give_up(self) -> None:
        """Stop loading and release the slots leased for it. The caller releases those in the request's block tables."""
        self._expect(WAITING | COMING)
        self._withdraw()
        if self.state is LoadingState.EARLY:  # only after the step has failed
            self._drop_early()
        if self._promotion is not None:
            self._cache.cancel(self._promotion)
        self._become(LoadingState.GIVEN_UP)
        self._found = self._promotion = None

    def check(self) -> None:
        """Raise AssertionError if the state of the load does not fit its other attributes or its request."""
        state, promotion = self.state, self._promotion
        assert (self._found is not None) == (state in (LoadingState.FOUND, LoadingState.ROOM)), (
            f"{state}, and has found {self._found}"
        )
        assert self._attempt is None or state is LoadingState.ROOM, f"{state}, and waits for room"
        assert (promotion is not None) == (state in COMING or state is LoadingState.LOADED), f"{state}, {promotion}"
        assert bool(self._early_slots) == (state is LoadingState.EARLY), (
            f"{state} with slots of its own: {self._early_slots}"
        )
        if promotion is not None and state is not LoadingState.LOADED:
            assert bool(promotion.start) == (state is LoadingState.SPLIT), (
                f"{state}, and loads from {promotion.start} on"
            )
        if state in WAITING or state in (LoadingState.PARKED, LoadingState.LATE):
            request = self._request
            assert not request.tables, f"{state}, and the request has blocks"
            assert request.num_computed == request.num_committed == 0, f"{state}, and the request has computed tokens"

    # --- implementation

    @property
    def _coming(self) -> Promotion:
        assert self._promotion is not None, f"a loading that is {self.state} brings nothing"
        return self._promotion

    def _expect(self, states: Set[LoadingState]) -> None:
        assert self.state in states, f"a loading that is {self.state}, not {', '.join(sorted(states))}"

    def _become(self, state: LoadingState) -> None:
        assert state in NEXT_STATES[self.state], f"a loading that is {self.state} never becomes {state}"
        self.state = state

    def _withdraw(self) -> None:
        if self._attempt is not None:
            self._around.room.withdraw(self._attempt)  # the wait for room was cut short, so its duration says nothing
            self._attempt = None

    def _lookup(self) -> Hit:
        request, cache = self._request, self._cache
        num_tokens = len(request.token_ids)
        request.chain.extend(request.token_ids)
        if not request.options.reads_cache:
            return cache.lookups.no_hit(request.chain, num_tokens)
        began_at = self._around.clock()
        hit = cache.lookup(request.chain, num_tokens)
        found_at = self._around.clock()
        if request.scores is not None and not request.scores.is_complete:
            hit = cache.plans.limit_hit(hit, request.scores.num_used, Reason.SCORED)
        if request.options.max_load_tokens is not None:
            hit = cache.plans.limit_load(hit, request.options.max_load_tokens)
        hit = cache.plans.plan_load(hit, num_tokens, self._around.busy_s(request))
        request.timeline.note(Stage.LOOKUP, began_at, found_at)
        request.timeline.note(Stage.PLAN, found_at, self._around.clock())
        return hit

    def _left_s(self) -> float:
        """Return how many seconds of the load's time limit are left."""
        return max(0.0, self._asked_at + self._around.max_s - self._around.clock())

    def _split(self, hit: Hit) -> None:
        """Promote the blocks from token `hit.start` on, while the request computes the tokens before them.

        The request gets those blocks before `hit.start` that are already on the device, and computes the others.
        """
        front = self._cache.promote(self._cache.plans.on_device(hit))
        assert front.done, "a promotion of blocks that are on the device is not done at once"
        self._promotion = self._cache.promote(hit, self._left_s())
        self._request.tables = front.tables
        self._request.num_committed = self._request.num_computed = front.num_tokens
        self._become(LoadingState.SPLIT)

    def _join(self) -> None:
        """Append to the request's block tables the blocks whose promotion `_split` started."""
        rest = self._coming
        for table, group, loaded in zip(self._request.tables, self._cache.groups, rest.tables, strict=True):
            table.extend(loaded[rest.start // group.block_size :])
        self._hand_over()

    def _promote(self, hit: Hit) -> None:
        earlier, self._promotion = self._promotion, self._cache.promote(hit, self._left_s())
        self._num_promotions += 1
        if earlier is not None:
            self._promotion.take_over(earlier)
            self._cache.cancel(earlier)
        if self._promotion.done:
            self._arrive()
        else:
            self._become(LoadingState.PARKED)

    def _arrive(self) -> None:
        """Give the request the promoted prefix. If a bad block ended the promotion early, promote the rest first."""
        promotion = self._coming
        if promotion.reason_at_end in CUT_SHORT and self._num_promotions < MAX_PROMOTIONS:
            hit = replace(self._lookup(), start=0)  # what has arrived is on the device, so there is nothing to split
            if hit.num_tokens > promotion.num_tokens:  # windowed layers may resume in between
                self._promote(hit)
                return
        self._request.tables = promotion.tables
        self._hand_over()

    def _hand_over(self) -> None:
        """Count the loaded tokens as computed by the request, and record when each tier's blocks arrived."""
        promotion, request = self._coming, self._request
        request.num_committed = promotion.num_tokens
        request.num_computed = promotion.num_tokens + promotion.num_copied
        for tier, came_at in promotion.came_at.items():
            request.timeline.note(PROMOTE[tier], self._begun_at, came_at)
        self._become(LoadingState.LOADED)

    def _drop_early(self) -> None:
        self._cache.release(self._early_slots)
        self._early_slots, self._request.tables = [], []
        self._request.num_computed = self._request.num_committed = 0
