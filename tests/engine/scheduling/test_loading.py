"""Loading: every way from the queue to a prefix on the device, in a world of late, failing and damaged copies."""

import random
from collections.abc import Callable, Sequence, Set

import pytest
from chaos import World
from fuzzed_engine import Lane, Odds, StirringQueue
from small_models import byte_tokenizer

from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.loading import COMING, NEXT_STATES, WAITING, Loading, LoadingContext, LoadingState
from kvtier.engine.scheduling.request import Request
from kvtier.engine.text.detokenizer import Detokenizer
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.lower.breaker import CircuitBreaker
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.up import uploads
from kvtier.tiers.up.load_planner import Demand, LoadPlan, LoadPlanner
from kvtier.tiers.up.prefill_speed import PrefillSpeed
from kvtier.transfer.transfer_engine import Route

BLOCK_SIZE = 4
NUM_DEVICE_SLOTS = 26  # room for three documents
NUM_HOST_SLOTS = 60  # room for seven
PROMPT = 8 * BLOCK_SIZE + 2
CHUNK = 3 * BLOCK_SIZE
LOAD_S = 20.0
HANGS_S = 5.0  # longer than a step that began early waits, shorter than a load may take
DOCUMENTS = "abcdefgh"
FEW_EVENTS = 3000  # events of a short walk
MAX_EVENTS = 300_000  # until every way has been gone: often 5,000, seldom 50,000
TOKENIZER = byte_tokenizer()
EVERY_STEP = {(state, later) for state, states in NEXT_STATES.items() for later in states}


class RestingQueue(StirringQueue):
    """A queue whose lanes can be made to do nothing for a while."""

    rests = False

    def stir(self) -> None:
        if not self.rests:
            super().stir()


class Walk(World):
    """Requests whose loadings go on in any order that is legal, a random one each time."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        store = MemoryStore(1 << 20)
        planner = LoadPlanner(PrefillSpeed(), CHUNK, self.look_at_the_clock, with_splits=True)
        planner.best = self.plan  # type: ignore[method-assign]
        super().__init__(
            [FullAttention(BLOCK_SIZE)],
            [64],
            NUM_DEVICE_SLOTS,
            NUM_HOST_SLOTS,
            store,
            rng,
            partial_blocks=False,
            by_layers=True,
            planner=planner,
        )
        self.around = LoadingContext(self.cache, self.clock, LOAD_S, CircuitBreaker(self.clock), lambda besides: 0.0)
        self.loadings: list[tuple[Request, Loading]] = []
        self.steps: set[tuple[LoadingState, LoadingState]] = set()
        self.with_room: set[Loading] = set()
        self.states: set[LoadingState] = set()  # in which all that is illegal has been tried

    def open_lanes(self, failing: float) -> None:
        self.finished = RestingQueue(self.rng, self.clock)  # type: ignore[assignment]  # what is used of a queue
        odds = Odds(failing=0.05, hanging=0.3, store_failing=0.0)
        self.lanes = {route: Lane(self.finished, self.rng, odds, self.clock, HANGS_S) for route in Route}
        self.finished.lanes = self.lanes

    def wait_for_index(self) -> None:
        while not self.cache.lower.status.is_indexed:
            self.cache.wait(1.0)

    def look_at_the_clock(self) -> float:
        return self.clock.now

    def plan(self, demand: Demand, *_: object) -> LoadPlan:
        """Plan to load all of a hit, or its end."""
        start = self.rng.choice([0, *demand.ends[:-1].tolist()])
        return LoadPlan(int(start), int(demand.ends[-1]))

    def something_happens(self) -> None:
        """Have one event of one loading, or of the world, happen."""
        rng = self.rng
        self.clock.now += 0.001
        dice = rng.random()
        if dice < 0.15 and len(self.loadings) < 3:
            self.ask()
        elif dice < 0.25:
            self.finished.stir()
            self.cache.poll()
        elif dice < 0.28:
            self.cache.spill()
        elif dice < 0.30:
            self.clock.now += rng.choice([0.1, 1.0, LOAD_S])
            self.cache.poll()
        elif dice < 0.36:
            self.rot_a_host_block()
        elif dice < 0.38:
            self.cache.drain.flush(5.0, self.let_copies_end)
            for _ in range(8):
                self.rot_a_host_block()
        elif dice < 0.39:
            self.evict_blocks(self.names(rng.choice(DOCUMENTS), PROMPT))
        elif self.loadings:
            self.go_on(*rng.choice(self.loadings))

    def let_copies_end(self, num_left: int) -> None:
        self.clock.now += 0.1
        self.finished.stir()

    def ask(self) -> None:
        chain = self.chain(self.rng.choice(DOCUMENTS), PROMPT)
        request = Request(chain.token_ids, SamplingParams(), chain, Detokenizer(TOKENIZER))
        self.loadings.append((request, Loading(request, self.around)))

    def go_on(self, request: Request, loading: Loading) -> None:
        """Call one of the events that the loading's state has."""
        before = loading.state
        event = self.rng.choice(self.events(request, loading))
        event()
        loading.check()
        if loading.state is not before or event == loading.take_in:
            self.steps.add((before, loading.state))
        if loading.state is LoadingState.LOADED:
            self.see_that_bytes_are_right(request)
            self.compute_to(request, PROMPT)
        if loading.state in (LoadingState.LOADED, LoadingState.GIVEN_UP):
            self.release(request)
            self.loadings.remove((request, loading))
        if loading.state not in self.states:
            self.states.add(loading.state)
            see_what_is_illegal(loading)

    def events(self, request: Request, loading: Loading) -> Sequence[Callable[[], object]]:
        """The events of the loading's state; those that bring it further several times, to be drawn more often."""

        def ask_for_room() -> None:
            if loading.ask_for_room():
                self.with_room.add(loading)

        def begin_early() -> None:
            if loading.begin_early(CHUNK):
                assert loading.gate is not None

        def settle_in_vain() -> None:
            self.finished.rests = True
            loading.settle()
            self.finished.rests = False

        def compute() -> None:
            self.compute_to(request, request.num_computed + min(loading.num_to_compute, CHUNK))

        leaving = [loading.defer, loading.wait_turn, loading.give_up]
        arrived = [loading.take_in] * 8 if loading.has_come else []
        parked = [*arrived, *[begin_early] * 4, loading.give_up]
        events: dict[LoadingState, list[Callable[[], object]]] = {
            LoadingState.QUEUED: [*[loading.look_up] * 8, *leaving],
            LoadingState.FOUND: [*[ask_for_room] * 8, loading.look_up, *leaving],
            LoadingState.ROOM: [loading.begin if loading in self.with_room else ask_for_room] * 8
            + [loading.look_up, *leaving],
            LoadingState.PARKED: parked,
            LoadingState.EARLY: [*[loading.settle] * 4, *[settle_in_vain] * 4, loading.give_up],
            LoadingState.LATE: parked,
            LoadingState.SPLIT: [*arrived, compute, compute, loading.give_up],
        }
        return events[loading.state]

    def compute_to(self, request: Request, end: int) -> None:
        """Compute tokens as a model does, if there are slots."""
        slots = self.cache.allocate([-(-end // BLOCK_SIZE) - len(table) for table in request.tables])
        if slots is None:
            return
        for table, new in zip(request.tables, slots, strict=True):
            table.extend(new)
        self.compute(request.tables, request.chain, request.num_committed, end)
        request.num_computed = request.num_committed = end

    def release(self, request: Request) -> None:
        if request.tables:
            self.cache.release(request.tables)

    def see_that_bytes_are_right(self, request: Request) -> None:
        (table,) = request.tables
        for slot, name in zip(table, request.chain.names[: request.num_computed // BLOCK_SIZE], strict=False):
            assert (self.device[0][slot] == self.bytes_of(0, name)).all(), "a request goes on from wrong bytes"

    def end(self) -> None:
        """Give up all loadings, end all copies, and assert that no lease is lost."""
        for request, loading in self.loadings:
            loading.give_up()
            self.release(request)
        for lane in self.lanes.values():
            lane.let_go()
        self.settle()
        self.check()
        self.around.room.check()
        assert self.cache.free_slots() == [NUM_DEVICE_SLOTS], "a lease was lost"


def see_what_is_illegal(loading: Loading) -> None:
    """Assert that events that the state does not have raise and change nothing, and `check` finds a wrong state."""
    state = loading.state
    events: dict[Callable[[], object], Set[LoadingState]] = {
        loading.look_up: WAITING,
        loading.defer: WAITING,
        loading.ask_for_room: {LoadingState.FOUND, LoadingState.ROOM},
        loading.begin: {LoadingState.ROOM},
        loading.take_in: {state} if loading.has_come and state is not LoadingState.LOADED else set(),
        lambda: loading.begin_early(CHUNK): {LoadingState.PARKED, LoadingState.LATE},
        loading.settle: {LoadingState.EARLY},
        loading.give_up: WAITING | COMING,
    }
    for event, states in events.items():
        if state not in states:
            with pytest.raises(AssertionError):
                event()
            assert loading.state is state
            loading.check()
    for wrong in WAITING if state in COMING else COMING:
        loading.state = wrong
        with pytest.raises(AssertionError):
            loading.check()
    loading.state = state


def walk(monkeypatch: pytest.MonkeyPatch, max_events: int) -> Walk:
    """Go on until every way has been gone, or so many events have happened; then end all loadings."""
    monkeypatch.setattr(uploads, "BY_LAYERS_BYTES", 0)
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    walk = Walk(seed)
    for _ in range(max_events):
        walk.something_happens()
        if walk.steps == EVERY_STEP:
            break
    walk.end()
    return walk


def test_a_loading_goes_no_way_that_its_table_has_not_and_no_lease_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = walk(monkeypatch, FEW_EVENTS)

    assert gone.steps <= EVERY_STEP
    assert {LoadingState.PARKED, LoadingState.SPLIT, LoadingState.LOADED, LoadingState.GIVEN_UP} <= gone.states


@pytest.mark.long
def test_every_way_of_the_table_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = walk(monkeypatch, MAX_EVENTS)

    assert gone.steps == EVERY_STEP
    assert gone.states == set(LoadingState)
