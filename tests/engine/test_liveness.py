"""Whatever one copy does that never comes back: who waits, and for how long? On a clock that only waiting moves.

Every transfer of a scripted day is, one run after the other, the one that hangs: on a lane whose only thread it takes
with it, and on one that has another thread.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from chaos import World
from hanging import Fault, HangingWorld
from small_models import byte_tokenizer

from kvtier.engine.config import SchedulerConfig
from kvtier.engine.core import LOAD_TIMEOUT_S
from kvtier.engine.detokenizer import Detokenizer
from kvtier.engine.look_ahead import LookAhead
from kvtier.engine.request import FinishReason, Request
from kvtier.engine.runner import ARRIVAL_WAIT_S
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.scheduler import SETTLE_S, Scheduler, Work
from kvtier.engine.terms import Terms
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers import arrivals
from kvtier.tiers.block_hash import BlockChain, ExtraKeys
from kvtier.tiers.breaker import HUNG_S, BreakerState
from kvtier.tiers.groups import FullAttention
from kvtier.tiers.holds import Hold
from kvtier.tiers.spiller import PATIENCE_S
from kvtier.tiers.tier import Tier
from kvtier.transfer.transfer_engine import Route

BLOCK_SIZE = 4
DOCUMENT = 24  # tokens: six blocks
NUM_DEVICE_SLOTS = 40
STEP_S = 0.05
# Without a fault a request has its first token after two steps. With one it may find that no copy gets past a late one.
SHORT_S = PATIENCE_S + 20 * STEP_S
DAY = "abcdefgh" "abab" "hgfe" "dcba" "acegbdfh" "aabbccdd" "hfdbgeca" "abcdefgh"
TOKENIZER = byte_tokenizer()


@dataclass(eq=False)
class Asked:
    """A request, and when on our clock it came and had its first token."""

    request: Request
    at: float
    first_token_at: float | None = None
    may_begin_late: bool = field(default=False)

    @property
    def waited_s(self) -> float:
        assert self.first_token_at is not None, "a request that never got a token"
        return self.first_token_at - self.at


class Engine(HangingWorld):
    """A scheduler over three tiers with a model that writes the bytes which each block must have."""

    def __init__(self, fault: Fault | None = None, by_layers: bool = False) -> None:
        self.fault = fault
        self.asked: list[Asked] = []
        self.holds: list[Hold] = []
        super().__init__(
            [FullAttention(BLOCK_SIZE)],
            [64],
            NUM_DEVICE_SLOTS,
            48,
            MemoryStore(1 << 24),
            random.Random(1),
            partial_blocks=False,
            by_layers=by_layers,
        )
        config = SchedulerConfig(token_budget=64, prefill_chunk=32, max_running=3)
        ahead = LookAhead(self.cache, 12 * 64, self.clock, 30.0)
        self.scheduler = Scheduler(self.cache, config, LOAD_TIMEOUT_S, clock=self.clock, look_ahead=ahead)

    @property
    def hung_at(self) -> float | None:
        """When the transfer that never comes back began."""
        return min((lane.stuck_at for lane in self.lanes.values() if lane.stuck_at is not None), default=None)

    def ask(self, document: str) -> Asked:
        chain = BlockChain(BLOCK_SIZE, ExtraKeys(cache_salt=document))
        prompt = list(range(DOCUMENT)) + [1000 + len(self.asked)] * 3
        chain.extend(prompt)
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        request = Request(prompt, sampling, chain, Detokenizer(TOKENIZER), Terms())
        self.scheduler.add(request)
        self.asked.append(Asked(request, self.clock.now))
        return self.asked[-1]

    def step(self) -> None:
        """What `EngineCore.step` does."""
        work = self.scheduler.schedule()
        for item in work:
            self.fill(item)
        self.let_time_pass(STEP_S)
        for item in work:
            self.wait_for_layers(item)
        lost = self.scheduler.settle(work)
        self.scheduler.computed([item for item in work if item.request not in lost])
        for item in work:
            if item.request not in lost and item.request.num_to_compute == 0:
                self.sample(item.request)
        self.cache.spill()
        if not work:
            self.cache.wait(STEP_S)

    def fill(self, work: Work) -> None:
        """See that what the request goes on from is right, and write what it computes."""
        request, end = work.request, work.request.num_computed + work.num_tokens
        request.chain.extend(request.token_ids)
        (table,) = request.tables
        is_arriving = request.promotion is not None and request.promotion.gate is not None
        for block_id, name in enumerate(request.chain.names[: end // BLOCK_SIZE]):
            expected, block = self.bytes_of(0, name), self.device[0][table[block_id]]
            if block_id >= request.num_computed // BLOCK_SIZE:
                block[:] = expected
            elif not is_arriving:
                assert (block == expected).all(), "a request goes on from wrong bytes"

    def wait_for_layers(self, work: Work) -> None:
        """What attention does at each layer of a prefix that is still arriving."""
        promotion = work.request.promotion
        if promotion is not None and promotion.gate is not None:
            promotion.gate.wait(3, 4, give_up_at=0.0)
            self.let_time_pass(ARRIVAL_WAIT_S if promotion.gate.missed else 0.0)

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
            if hour % 6 == 0 and (hold := self.cache.hold(self.chain("cgh"[hour % 3], DOCUMENT), DOCUMENT)) is not None:
                self.holds.append(hold)
            if hour % 6 == 3 and self.holds:
                self.cache.end_hold(self.holds.pop(0))
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
        """Every client and every hold leaves."""
        for asked in self.asked:
            self.scheduler.abort(asked.request)
        for hold in self.holds:
            self.cache.end_hold(hold)

    def free(self) -> list[int]:
        residency = self.cache._residency
        assert residency.host is not None
        return [pool.num_slots - pool.num_free for pool in (*residency.device.pools, *residency.host.pools)]


def whole_day(fault: Fault | None, by_layers: bool) -> Engine:
    engine = Engine(fault, by_layers)
    for _ in engine.day():
        pass
    engine.check()
    return engine


def num_transfers(by_layers: bool) -> dict[Route, int]:
    return {route: lane.num_submitted for route, lane in whole_day(None, by_layers).lanes.items()}


@pytest.fixture(autouse=True)
def _small_blocks_come_by_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "BY_LAYERS_BYTES", 0)


def test_a_day_without_a_fault_uses_every_lane_and_nobody_waits() -> None:
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
        # Who is there when it happens waits no longer than its deadline, and who comes until it is known no longer
        # than that takes.
        assert waited_s <= LOAD_TIMEOUT_S + STALL_S + SHORT_S, f"{asked.at}: {waited_s} s, beyond its deadline"
        left_s = max(0.0, hung_at + KNOWN_S - asked.at)
        assert waited_s <= left_s + SHORT_S, f"{asked.at - hung_at} s after the fault: {waited_s} s"


def live_through(fault: Fault, by_layers: bool) -> Engine:
    """The day, and all that must hold of it."""
    engine = whole_day(fault, by_layers)
    see_that_nobody_waits_twice(engine)
    return engine


def see_that_it_still_serves(engine: Engine, fault: Fault) -> None:
    """What works is used: a document that everybody has asked for comes from where it is."""
    disk = engine.cache._residency.disk
    assert disk is not None
    has_threads = fault.num_threads > 1
    engine.clock.now += 2 * HUNG_S
    for _ in range(10):
        engine.step()
    if fault.route is not Route.DISK_TO_HOST or has_threads:
        assert disk.reading.state is BreakerState.CLOSED
    assert engine.cache._residency.is_cut_off == (fault.route is Route.HOST_TO_DEVICE and not has_threads)
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
    """Closing takes no longer than a lane's time to close, and nothing is lost when what hung has ended."""
    engine.let_go()
    began_at = engine.clock.now
    engine.cache.flush(120.0)
    assert engine.clock.now - began_at <= HUNG_S + SHORT_S
    engine.check()

    engine.come_back()
    for _ in range(5):
        engine.let_time_pass(1.0)
        engine.cache.poll()
        engine.settle()
    engine.check()
    assert engine.free() == [0, 0], "a lease was lost"
    assert not engine.cache._residency.is_cut_off
    assert engine.cache.close()


def faults(route: Route, num_threads: int, by_layers: bool, most: int | None) -> list[Fault]:
    """Some of the day's transfers on that route, or all."""
    numbers = list(range(num_transfers(by_layers)[route]))
    if most is not None:
        seed = random.SystemRandom().randrange(1 << 30)
        print(f"seed {seed}")
        numbers = random.Random(seed).sample(numbers, min(most, len(numbers)))
    return [Fault(route, number, num_threads) for number in numbers]
