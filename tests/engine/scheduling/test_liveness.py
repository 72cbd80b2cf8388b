"""Copies that never end: which requests wait, and for how long, on a clock that only waiting moves.

Every transfer of a scripted day is, one run after the other, the one that hangs: on a lane whose only thread it takes
with it, and on one that has another thread.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
from hanging import LANES, Fault, HangingWorld
from small_models import byte_tokenizer

from kvtier.engine.build_core import LOAD_TIMEOUT_S
from kvtier.engine.config import SchedulerConfig
from kvtier.engine.model.paged_model import ARRIVAL_WAIT_S
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.loading import ROOM_SHARE, SETTLE_S
from kvtier.engine.scheduling.look_ahead import LookAhead
from kvtier.engine.scheduling.request import FinishReason, Request, RequestOptions
from kvtier.engine.scheduling.scheduler import Scheduler, Work
from kvtier.engine.scheduling.timed_pins import TimedPins
from kvtier.engine.text.detokenizer import Detokenizer
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.lower.breaker import HUNG_S, BreakerState
from kvtier.tiers.lower.copies import HUNG_COPY_S
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.tier import EvictionCause, Tier
from kvtier.tiers.pins import Pin
from kvtier.tiers.up import uploads
from kvtier.transfer.lane import CLOSE_TIMEOUT_S
from kvtier.transfer.transfer_engine import Route

BLOCK_SIZE = 4
DOCUMENT = 24  # tokens: six blocks
NUM_DEVICE_SLOTS = 40
STEP_S = 0.05
# Without a fault a request has its first token after two steps. With one it may find that no copy gets past a late one.
SHORT_S = HUNG_COPY_S + 20 * STEP_S
DAY = "abcdefghababhgfedcbaacegbdfhaabbccddhfdbgecaabcdefgh"
TOKENIZER = byte_tokenizer()


@dataclass(eq=False)
class Asked:
    """A request, with the times of its arrival and of its first token on the test's clock."""

    request: Request
    at: float
    first_token_at: float | None = None

    @property
    def waited_s(self) -> float:
        assert self.first_token_at is not None, "a request that never got a token"
        return self.first_token_at - self.at


class Engine(HangingWorld):
    """A scheduler over three tiers with a model that writes the bytes which each block must have."""

    def __init__(
        self,
        fault: Fault | None = None,
        by_layers: bool = False,
        store: MemoryStore | None = None,
        look_ahead_blocks: int = 12,
    ) -> None:
        self.fault = fault
        self.asked: list[Asked] = []
        self.holds: list[Pin] = []
        super().__init__(
            [FullAttention(BLOCK_SIZE)],
            [64],
            NUM_DEVICE_SLOTS,
            48,
            MemoryStore(1 << 24) if store is None else store,
            random.Random(1),
            partial_blocks=False,
            by_layers=by_layers,
        )
        config = SchedulerConfig(token_budget=64, prefill_chunk=32, max_running=3)
        self.pins = TimedPins(self.cache, self.clock)
        ahead = LookAhead(self.cache, self.pins, lambda: look_ahead_blocks * 64, 30.0)
        self.scheduler = Scheduler(self.cache, config, LOAD_TIMEOUT_S, clock=self.clock, look_ahead=ahead)

    @property
    def hung_at(self) -> float | None:
        """The time at which the transfer that never ends began."""
        return min((lane.stuck_at for lane in self.lanes.values() if lane.stuck_at is not None), default=None)

    def ask(self, document: str, num_tokens: int = DOCUMENT, max_tokens: int = 2, priority: int = 0) -> Asked:
        chain = BlockChain(BLOCK_SIZE, ExtraKeys(cache_salt=document))
        prompt = list(range(num_tokens)) + [1000 + len(self.asked)] * 3
        chain.extend(prompt)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(prompt, sampling, chain, Detokenizer(TOKENIZER), RequestOptions(priority))
        self.scheduler.add(request)
        self.asked.append(Asked(request, self.clock.now))
        return self.asked[-1]

    def step(self) -> None:
        """Do what `EngineCore.step` does."""
        work = self.scheduler.schedule()
        for item in work:
            self.fill(item)
        self.let_time_pass(STEP_S)
        for item in work:
            self.wait_for_layers(item)
        lost = self.scheduler.settle(work)
        self.scheduler.on_computed([item for item in work if item.request not in lost])
        for item in work:
            if item.request not in lost and item.request.num_to_compute == 0:
                self.sample(item.request)
        self.cache.spill()
        self.pins.tick()
        self.scheduler.check()
        if not work:
            self.cache.wait(STEP_S)

    def fill(self, work: Work) -> None:
        """Assert that the blocks that the request continues are right, and write those that it computes."""
        request, end = work.request, work.request.num_computed + work.num_tokens
        request.chain.extend(request.token_ids)
        (table,) = request.tables
        is_arriving = work.gate is not None
        for block_id, name in enumerate(request.chain.names[: end // BLOCK_SIZE]):
            expected, block = self.bytes_of(0, name), self.device[0][table[block_id]]
            if block_id >= request.num_computed // BLOCK_SIZE:
                block[:] = expected
            elif not is_arriving:
                assert (block == expected).all(), "a request goes on from wrong bytes"

    def wait_for_layers(self, work: Work) -> None:
        """Wait as attention does at each layer of a prefix that is still arriving."""
        if work.gate is not None:
            work.gate.wait(3, 4, give_up_at=0.0)
            self.let_time_pass(ARRIVAL_WAIT_S if work.gate.missed else 0.0)

    def sample(self, request: Request) -> None:
        (asked,) = [asked for asked in self.asked if asked.request is request]
        if asked.first_token_at is None:
            asked.first_token_at = self.clock.now
        request.token_ids.append(7)
        if len(request.generated) >= request.sampling.max_tokens:
            request.finish(FinishReason.LENGTH)
            self.scheduler.retire(request)

    def day(self) -> Iterator[None]:
        """A burst of requests, or one, every half second; documents held for some seconds. Yields after every step."""
        for hour, document in enumerate(DAY):
            self.ask(document)
            if hour % 5 == 4:
                self.ask("abcdefgh"[hour % 8])
            if (
                hour % 6 == 0
                and (pin := self.cache.pins.pin(self.chain("cgh"[hour % 3], DOCUMENT), DOCUMENT)) is not None
            ):
                self.holds.append(pin)
            if hour % 6 == 3 and self.holds:
                self.cache.pins.unpin(self.holds.pop(0))
            for _ in range(10):
                self.step()
                yield
        for _ in range(3000):
            if not self.scheduler.has_work:
                return
            self.step()
            yield
        raise AssertionError("a request never ends")

    def let_go(self) -> None:
        """End all requests and release all held slots."""
        for asked in self.asked:
            self.scheduler.abort(asked.request)
        for pin in self.holds:
            self.cache.pins.unpin(pin)

    def free(self) -> list[int]:
        assert self.host is not None
        slots = (*(group.slots for group in self.cache.residency.groups), *self.host)
        return [each.pool.num_slots - each.pool.num_free for each in slots]


def whole_day(fault: Fault | None, by_layers: bool) -> Engine:
    engine = Engine(fault, by_layers)
    for _ in engine.day():
        pass
    engine.check()
    return engine


@cache
def num_transfers(by_layers: bool) -> dict[Route, int]:
    return {route: lane.num_submitted for route, lane in whole_day(None, by_layers).lanes.items()}


@pytest.fixture(autouse=True)
def _small_blocks_come_by_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BY_LAYERS_BYTES", 0)


def test_a_day_without_a_fault_uses_every_lane_and_no_request_waits() -> None:
    engine = whole_day(None, by_layers=False)

    assert max(asked.waited_s for asked in engine.asked) < SHORT_S
    assert all(lane.num_submitted > 10 for lane in engine.lanes.values())
    tokens = engine.scheduler.admitted_tokens
    assert min(tokens.device, tokens.host, tokens.disk) > 0


# So long after a copy began that never comes back, a deadline has passed, and the lane's rest, at the latest.
KNOWN_S = max(LOAD_TIMEOUT_S, HUNG_S) + 2.0
STALL_S = ARRIVAL_WAIT_S + SETTLE_S  # of a step that began with a prefix which never arrives


def see_that_nobody_waits_twice(engine: Engine) -> None:
    hung_at = engine.hung_at
    assert hung_at is not None, "the fault never happened"
    for asked in engine.asked:
        waited_s = asked.waited_s
        # A request that is there when the copy hangs waits no longer than its deadline. One that comes before that is
        # known waits no longer than it takes to know it.
        assert waited_s <= LOAD_TIMEOUT_S + STALL_S + SHORT_S, f"{asked.at}: {waited_s} s, beyond its deadline"
        left_s = max(0.0, hung_at + KNOWN_S - asked.at)
        assert waited_s <= left_s + SHORT_S, f"{asked.at - hung_at} s after the fault: {waited_s} s"


def live_through(fault: Fault, by_layers: bool) -> Engine:
    """Run the whole day, and assert all that must hold of it."""
    engine = whole_day(fault, by_layers)
    see_that_nobody_waits_twice(engine)
    return engine


def see_that_it_still_serves(engine: Engine, fault: Fault) -> None:
    """Assert that the tiers that work are used: a document that all requests asked for comes from its tier."""
    disk = engine.index.disk
    assert disk is not None
    has_threads = fault.num_threads > 1
    engine.clock.now += 2 * HUNG_S
    for _ in range(10):
        engine.step()
    if fault.route is not Route.DISK_TO_HOST or has_threads:
        assert disk.reading.state is BreakerState.CLOSED
    assert engine.cache.residency.is_cut_off == (fault.route is Route.HOST_TO_DEVICE and not has_threads)
    asked = engine.ask("a")
    while asked.first_token_at is None:
        engine.step()
    assert asked.waited_s < SHORT_S
    warm = engine.ask("a")
    while warm.first_token_at is None:
        engine.step()
    assert warm.request.tokens is not None
    assert warm.request.tokens.device == DOCUMENT
    while engine.scheduler.has_work:
        engine.step()


def see_that_it_ends(engine: Engine) -> None:
    """Assert that closing takes no longer than a lane may take, and no lease is lost once hanging copies have ended."""
    engine.let_go()
    began_at = engine.clock.now
    engine.cache.drain.flush(120.0)
    assert engine.clock.now - began_at <= HUNG_S + SHORT_S
    assert engine.cache.free_slots()[0] >= NUM_DEVICE_SLOTS // 2  # but for those of copies that hang
    engine.check()

    engine.come_back()
    for _ in range(5):
        engine.let_time_pass(1.0)
        engine.cache.poll()
        engine.settle()
    engine.check()
    assert engine.free() == [0, 0], "a lease was lost"
    assert not engine.cache.residency.is_cut_off
    assert engine.cache.close()


def faults(route: Route, num_threads: int, by_layers: bool, limit: int | None) -> list[Fault]:
    """The numbers of the day's transfers on a route that hang: some, or all."""
    numbers = list(range(num_transfers(by_layers)[route]))
    if limit is not None:
        seed = random.SystemRandom().randrange(1 << 30)
        print(f"seed {seed}")
        numbers = random.Random(seed).sample(numbers, min(limit, len(numbers)))
    return [Fault(route, number, num_threads) for number in numbers]


EVERY_LANE = pytest.mark.parametrize(
    ("route", "num_threads"), [pytest.param(route, n, id=f"{route}-{n}") for route in LANES for n in (1, 2)]
)


def live_through_some(
    route: Route, num_threads: int, by_layers: bool, limit: int | None, patch: pytest.MonkeyPatch
) -> None:
    for fault in faults(route, num_threads, by_layers, limit):
        print(fault)
        engine = live_through(fault, by_layers)
        patch.setattr(time, "sleep", engine.let_time_pass)
        see_that_it_still_serves(engine, fault)
        see_that_it_ends(engine)


@EVERY_LANE
@pytest.mark.parametrize("by_layers", [False, True])
def test_one_request_at_most_waits_for_a_copy_that_never_comes_back(
    route: Route, num_threads: int, by_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_through_some(route, num_threads, by_layers, 2, monkeypatch)


@pytest.mark.slow
@EVERY_LANE
@pytest.mark.parametrize("by_layers", [False, True])
def test_one_request_at_most_waits_whichever_copy_never_comes_back(
    route: Route, num_threads: int, by_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_through_some(route, num_threads, by_layers, None, monkeypatch)


def live_on(engine: Engine, num_steps: int) -> None:
    """Run so many steps of the day after the copy hung."""
    for _ in engine.day():
        if engine.hung_at is not None:
            num_steps -= 1
            if num_steps < 0:
                return


@EVERY_LANE
def test_clients_may_leave_at_any_moment_after_a_copy_hung_and_nothing_is_lost(
    route: Route, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    (fault,) = faults(route, num_threads, by_layers=True, limit=1)
    engine = Engine(fault, by_layers=True)
    monkeypatch.setattr(time, "sleep", engine.let_time_pass)

    num_steps = rng.randrange(100)
    live_on(engine, num_steps)
    engine.let_go()
    engine.check()

    assert not engine.scheduler.has_work
    see_that_it_ends(engine)


def test_copies_on_another_lane_do_not_lengthen_the_wait_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Fault(Route.HOST_TO_DISK, number=2, num_threads=1), by_layers=True)
    monkeypatch.setattr(time, "sleep", engine.let_time_pass)

    live_on(engine, 86)  # so that the flush itself finds out that the disk hangs, and copies to host go on after that

    see_that_it_ends(engine)


@pytest.mark.parametrize("route", LANES)
def test_closing_waits_once_for_a_lane_that_hangs_and_says_so(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = faults(route, num_threads=1, by_layers=False, limit=1)
    engine = Engine(fault)
    monkeypatch.setattr(time, "sleep", engine.let_time_pass)
    for _ in engine.day():
        if engine.hung_at is not None:
            break
    began_at = engine.clock.now

    engine.let_go()
    engine.cache.drain.flush(120.0)
    closed = engine.cache.close()

    assert not closed
    assert engine.clock.now - began_at <= HUNG_S + CLOSE_TIMEOUT_S + SHORT_S


# --- each fault by itself


def without_answers(engine: Engine, seconds: float) -> None:
    """Let time pass and lanes work, without a step."""
    until = engine.clock.now + seconds
    while engine.clock.now < until:
        engine.step()


def wait_for(engine: Engine, *documents: str) -> list[float]:
    """Ask for documents one after the other; how long each waits for its first token."""
    waits = []
    for document in documents:
        asked = engine.ask(document)
        while asked.first_token_at is None:
            engine.step()
        waits.append(asked.waited_s)
    return waits


def only_on_disk(engine: Engine, *documents: str) -> None:
    """Have documents computed and written, then pushed out of device and host memory."""
    wait_for(engine, *documents)
    while engine.scheduler.has_work:
        engine.step()
    engine.flush()
    for document in documents:
        chain = engine.chain(document, DOCUMENT)
        engine.evict_blocks(chain.names)
        assert set(engine.cache.lookups.where(chain)) == {Tier.DISK}


def test_a_read_that_hangs_is_waited_for_once() -> None:
    engine = Engine()
    only_on_disk(engine, *"abc")
    lane = engine.lanes[Route.DISK_TO_HOST]
    lane.hangs = frozenset([lane.num_submitted])

    first = wait_for(engine, "a")
    without_answers(engine, 3.0)
    engine.evict_blocks(engine.names("a", DOCUMENT))
    later = wait_for(engine, "b", "a", "c")

    assert first[0] == pytest.approx(LOAD_TIMEOUT_S, abs=0.5)
    assert max(later) < SHORT_S
    # By other readers; what was computed instead of the block that hangs was written again.
    assert [asked.request.tokens.disk for asked in engine.asked[-3:]] == [DOCUMENT] * 3
    engine.check()


def test_what_a_read_that_hung_brings_after_all_is_in_host_memory() -> None:
    engine = Engine()
    only_on_disk(engine, "a")
    lane = engine.lanes[Route.DISK_TO_HOST]
    lane.hangs = frozenset([lane.num_submitted])
    chain = engine.chain("a", DOCUMENT)
    hit = engine.cache.lookup(chain, DOCUMENT + 1)
    promotion = engine.cache.promote(hit, timeout_s=1.0)
    engine.settle()
    engine.clock.now += 1.0
    engine.cache.poll()
    assert (promotion.done, promotion.num_tokens) == (True, 0)
    assert engine.cache.lookups.where(chain) == [None] * 6

    engine.come_back()

    assert engine.cache.lookups.where(chain) == [Tier.HOST] * 6
    engine.check()
    without_answers(engine, 2.0)
    engine.evict_blocks(chain.names)
    assert engine.cache.lookups.where(chain) == [Tier.DISK] * 6


def test_a_write_that_hangs_keeps_no_load_from_a_disk_that_reads_well() -> None:
    engine = Engine()
    only_on_disk(engine, *"ab")
    engine.lanes[Route.HOST_TO_DISK].hangs = frozenset(range(10_000))
    for document in "cdefghijklmnop":  # until host memory is full of what is not on disk
        wait_for(engine, document)
    without_answers(engine, 2.0)
    host = engine.index.host
    assert host is not None
    assert len(host[0].dirty) >= host[0].pool.num_slots - 6

    waits = wait_for(engine, "a", "b")

    assert max(waits) < SHORT_S
    assert [asked.request.tokens.disk for asked in engine.asked[-2:]] == [DOCUMENT, DOCUMENT]
    engine.check()


def test_room_that_a_slow_disk_makes_is_waited_for_half_of_a_load_s_time_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    only_on_disk(engine, *"ab")
    monkeypatch.setattr(TieredCache, "make_room", lambda cache, hit: hit.num_tokens == 0)  # it moves, and never ends

    first = engine.ask("a")
    behind = engine.ask("z")
    later = engine.ask("b")
    while engine.scheduler.has_work:
        engine.step()

    assert first.waited_s == pytest.approx(ROOM_SHARE * LOAD_TIMEOUT_S, abs=0.5)
    assert behind.waited_s <= first.waited_s + SHORT_S
    assert later.waited_s <= first.waited_s + SHORT_S
    assert [asked.request.tokens.recomputed for asked in (first, later)] == [3, 3]  # loaded nevertheless


def test_after_room_was_waited_for_a_load_has_what_is_left_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    only_on_disk(engine, "a")
    monkeypatch.setattr(TieredCache, "make_room", lambda cache, hit: hit.num_tokens == 0)
    lane = engine.lanes[Route.DISK_TO_HOST]
    lane.hangs = frozenset([lane.num_submitted])

    waits = wait_for(engine, "a")

    assert waits[0] == pytest.approx(LOAD_TIMEOUT_S, abs=0.5)


def test_the_time_of_a_load_does_not_pass_while_a_more_urgent_request_waits_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(look_ahead_blocks=0)
    only_on_disk(engine, "a")
    running = engine.ask("y", max_tokens=100, priority=-2)
    while running.first_token_at is None:
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(TieredCache, "make_room", lambda cache, hit: hit.num_tokens == 0)
        asked = engine.ask("a")
        engine.step()  # it has slots, and asks for room
        urgent = engine.ask("z", num_tokens=140, priority=-1)  # needs the slots of the one that runs
        engine.step()
        engine.clock.now += 2 * LOAD_TIMEOUT_S
        engine.scheduler.abort(urgent.request)

    while asked.first_token_at is None:
        engine.step()

    assert asked.request.tokens is not None
    assert asked.request.tokens.disk == DOCUMENT


def test_a_page_of_the_index_that_hangs_is_read_by_another_reader() -> None:
    before = Engine()
    only_on_disk(before, "a")
    assert isinstance(before.store, MemoryStore)

    after = Engine(Fault(Route.DISK_TO_HOST, 0, num_threads=2), store=before.store)

    assert after.cache.lower.status.is_indexed
    assert wait_for(after, "a")[0] < SHORT_S
    assert after.asked[0].request.tokens.disk == DOCUMENT
    after.come_back()
    after.check()


def test_a_prefix_that_never_arrives_stops_a_step_that_began_with_it_for_a_moment() -> None:
    engine = Engine(by_layers=True)
    wait_for(engine, "a")
    engine.flush()
    group = engine.cache.residency.groups[0]
    slots = group.pool.find_all(engine.names("a", DOCUMENT))
    group.slots.evict(slots, EvictionCause.ROOM)
    lane = engine.lanes[Route.HOST_TO_DEVICE]
    lane.num_threads, lane.hangs = 1, frozenset([lane.num_submitted])

    first = engine.ask("a")
    engine.step()  # begins early
    other = engine.ask("z")
    while engine.scheduler.has_work:
        engine.step()

    assert first.waited_s == pytest.approx(LOAD_TIMEOUT_S, abs=0.5)
    assert other.waited_s < STALL_S + SHORT_S
    engine.come_back()
    engine.let_go()
    assert engine.free()[0] == 0
    engine.check()
