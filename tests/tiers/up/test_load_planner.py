"""How much of a hit is loaded: speeds as they are learnt, and what follows from them."""

import random

import numpy as np
import pytest
from chaos import FakeClock
from small_cache import BLOCK_BYTES, DOCUMENT, balance, demand_of, read, world

from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.tiers.up.load_planner import Demand, LoadPlan, LoadPlanner, Moves
from kvtier.tiers.up.prefill_speed import PrefillSpeed, tokens_read
from kvtier.tiers.up.promotion import Misses
from kvtier.transfer.lane import Finished, InlineLane, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

CHUNK = 512


def device_seconds(depth: int, num_tokens: int) -> float:
    """A device that computes 10,000 tokens a second, and half of that at a depth of 20,000."""
    return 0.002 + num_tokens / 10_000 + tokens_read(depth, num_tokens) / 20_000 / 10_000


def learnt(noise: float = 0.0, num_steps: int = 100) -> PrefillSpeed:
    rng = random.Random(1)
    prefill = PrefillSpeed()
    for _ in range(num_steps):
        num_tokens, depth = rng.choice([32, 200, CHUNK]), rng.randrange(30_000)
        seconds = device_seconds(depth, num_tokens) * rng.uniform(1 - noise, 1 + noise)
        prefill.on_computed(num_tokens, tokens_read(depth, num_tokens), seconds)
    return prefill


@pytest.mark.parametrize(("depth", "num_tokens"), [(0, CHUNK), (0, 8 * CHUNK), (20_000, CHUNK), (1000, 100)])
def test_the_time_to_compute_is_learnt_from_steps(depth: int, num_tokens: int) -> None:
    expected = sum(
        device_seconds(depth + start, min(CHUNK, num_tokens - start)) for start in range(0, num_tokens, CHUNK)
    )

    assert learnt().seconds(depth, num_tokens, CHUNK) == pytest.approx(expected, rel=1e-6)
    assert learnt(noise=0.2).seconds(depth, num_tokens, CHUNK) == pytest.approx(expected, rel=0.1)


def test_steps_of_one_kind_predict_that_kind_and_nothing_negative() -> None:
    prefill = PrefillSpeed()
    for seconds in (0.05, 0.051, 0.049):
        prefill.on_computed(CHUNK, tokens_read(0, CHUNK), seconds)

    assert prefill.seconds(0, CHUNK, CHUNK) == pytest.approx(0.05, rel=0.02)
    assert prefill.seconds(0, 10, CHUNK) >= 0
    assert prefill.seconds(50_000, CHUNK, CHUNK) >= 0.05


@pytest.mark.parametrize("seed", range(20))
def test_prompts_of_one_length_do_not_make_tokens_seem_free(seed: int) -> None:
    rng, prefill = random.Random(seed), PrefillSpeed()
    for _ in range(9):
        num_tokens = 4 * CHUNK + rng.randrange(13, 26)
        seconds = num_tokens * 3e-4 * rng.uniform(0.8, 1.6)
        prefill.on_computed(num_tokens, tokens_read(0, num_tokens), seconds, num_steps=5)

    a_step_of_few, a_full_step = prefill.seconds(4 * CHUNK, 13, CHUNK), prefill.seconds(3 * CHUNK, CHUNK, CHUNK)

    assert a_full_step > 2 * a_step_of_few


def test_a_device_whose_steps_cost_the_same_whatever_they_have_is_known_as_such() -> None:
    rng, prefill = random.Random(1), PrefillSpeed()
    for _ in range(50):
        num_tokens, depth = rng.choice([32, 200, CHUNK]), rng.randrange(30_000)
        prefill.on_computed(num_tokens, tokens_read(depth, num_tokens), 0.02 * rng.uniform(0.9, 1.1))

    assert prefill.seconds(1000, 32, CHUNK) == pytest.approx(0.02, rel=0.15)
    assert prefill.seconds(1000, CHUNK, CHUNK) == pytest.approx(0.02, rel=0.15)


def test_a_device_that_becomes_slower_is_believed_after_some_steps() -> None:
    prefill = learnt()

    for _ in range(200):
        prefill.on_computed(CHUNK, tokens_read(0, CHUNK), 10 * device_seconds(0, CHUNK))

    assert prefill.seconds(0, CHUNK, CHUNK) == pytest.approx(10 * device_seconds(0, CHUNK), rel=0.05)


def moved(route: Route, num_bytes: int, seconds: float, finished_at: float, transfers: TransferEngine) -> None:
    transfers.speed(route).update_from(
        Transfer(int, num_bytes, lambda transfer: None, seconds=seconds, finished_at=finished_at)
    )


class Case:
    """A planner that knows the device's speed, and lanes that moved so many bytes a second."""

    def __init__(
        self, disk_bytes_per_s: float | None, device_bytes_per_s: float | None, with_splits: bool = False
    ) -> None:
        self.clock = FakeClock()
        finished: Finished = Finished()
        self.transfers = TransferEngine({route: InlineLane(finished) for route in Route}, finished)
        for route, speed in ((Route.DISK_TO_HOST, disk_bytes_per_s), (Route.HOST_TO_DEVICE, device_bytes_per_s)):
            if speed is not None:
                moved(route, int(speed), 1.0, 0.0, self.transfers)
        self.planner = LoadPlanner(learnt(), CHUNK, self.clock, with_splits)

    def plan(self, num_tokens: int, queued_disk_bytes: int = 0, busy_s: float = 0.0) -> LoadPlan:
        """For a hit of 8,000 tokens on disk, 1,000 bytes a token."""
        ends = np.arange(0, 8001, 100, dtype=np.float64)
        moves = {
            Route.DISK_TO_HOST: Moves(ends * 1000, queued_disk_bytes),
            Route.HOST_TO_DEVICE: Moves(ends * 1000, 0),
        }
        speeds = {route: self.transfers.speed(route) for route in moves}
        return self.planner.choose(Demand(ends, moves), num_tokens, busy_s, speeds)

    def best(self, num_tokens: int, queued_disk_bytes: int = 0, busy_s: float = 0.0) -> int:
        """How many tokens to load, of a hit that is not split."""
        start, end = self.plan(num_tokens, queued_disk_bytes, busy_s)
        assert start == 0
        return end


def test_fast_lanes_load_all() -> None:
    assert Case(1e9, 1e10).best(8500) == 8000


def test_a_lane_slower_than_computing_loads_nothing() -> None:
    assert Case(1e5, 1e10).best(8500) == 0
    assert Case(1e10, 1e5).best(8500) == 0


def test_deep_tokens_are_loaded_where_shallow_ones_would_not_be() -> None:
    """Loading all beats loading a part: the last tokens cost most to compute."""
    assert Case(0.9e7, 1e10).best(8500) == 0 or Case(0.9e7, 1e10).best(8500) == 8000
    seconds = learnt().seconds(0, 8500, CHUNK)
    loads_in = 8_000_000 / 1e7 + learnt().seconds(8000, 500, CHUNK)

    assert Case(1e7, 1e10).best(8500) == (8000 if loads_in <= seconds else 0)


def test_what_is_queued_on_the_lane_counts() -> None:
    case = Case(1e8, 1e10)

    assert case.best(8500) == 8000
    assert case.best(8500, queued_disk_bytes=int(1e9)) == 0  # ten seconds of others' loads


def test_loading_is_free_while_the_device_is_busy_anyway() -> None:
    case = Case(1e6, 1e10)

    assert case.best(8500) == 0
    assert case.best(8500, busy_s=30.0) == 8000
    assert 0 < case.best(8500, busy_s=3.0) < 8000  # so much comes meanwhile


@pytest.mark.parametrize("case", [Case(None, None), Case(None, 1e10)])
def test_a_lane_that_has_moved_nothing_is_thought_fast(case: Case) -> None:
    assert case.best(8500) == 8000


def test_before_the_device_is_known_everything_is_loaded() -> None:
    case = Case(1e3, 1e3)
    case.planner = LoadPlanner(PrefillSpeed(), CHUNK, case.clock)

    assert case.best(8500) == 8000


def test_a_lane_that_was_slow_is_tried_again_some_time() -> None:
    case = Case(1e6, 1e10)
    assert case.best(8500) == 0

    case.clock.now += 120
    assert case.best(8500) == 0
    case.clock.now += 300

    assert case.best(8500) == 8000
    case.clock.now += 10 * 365 * 86400.0
    assert case.best(8500) == 8000


def test_plans_are_counted_by_what_came_of_them() -> None:
    case = Case(1e6, 1e10)
    for busy_s in (0.0, 3.0, 30.0, 30.0):
        case.best(8500, busy_s=busy_s)

    assert case.planner.num_plans == {"nothing": 1, "part": 1, "all": 2}


def test_where_computing_is_as_fast_as_loading_both_are_done_at_once() -> None:
    case = Case(1e7, 1e10, with_splits=True)
    whole = 8_000_000 / 1e7

    start, end = case.plan(8500)

    front = learnt().seconds(0, start, CHUNK)
    assert end == 8000
    assert front == pytest.approx((8000 - start) * 1000 / 1e7, rel=0.1)  # both are done at the same time
    assert front < 0.6 * min(whole, learnt().seconds(0, 8000, CHUNK))
    assert case.planner.num_plans == {"split": 1}


@pytest.mark.parametrize("seed", range(50))
def test_a_split_beats_every_other_way_to_split(seed: int) -> None:
    """Against brute force: everything loaded, nothing loaded, and every place between."""
    rng = random.Random(seed)
    speed, num_tokens, busy_s = 10 ** rng.uniform(6, 8), rng.randrange(8001, 20_000), rng.choice([0.0, 0.2])
    case = Case(speed, 1e12, with_splits=True)
    compute = case.planner.compute_seconds
    places = range(0, 8001, 100)
    splits = {
        place: max(busy_s + compute(0, place), (8000 - place) * 1000 / speed) + compute(8000, num_tokens - 8000)
        for place in places
    }
    unsplit = min(max(busy_s, place * 1000 / speed) + compute(place, num_tokens - place) for place in places)

    start, end = case.plan(num_tokens, busy_s=busy_s)

    best = min(splits.values())
    if start:
        assert end == 8000
        assert splits[start] == pytest.approx(best)
        assert best < 0.9 * unsplit
    else:
        assert best >= 0.9 * unsplit * (1 - 1e-9)


@pytest.mark.parametrize(("disk_bytes_per_s", "tokens"), [(1e9, 8000), (1e5, 0)])
def test_nothing_is_split_for_a_small_gain(disk_bytes_per_s: float, tokens: int) -> None:
    assert Case(disk_bytes_per_s, 1e10, with_splits=True).plan(8500) == (0, tokens)


# --- in the cache


def test_a_hit_not_worth_loading_is_computed_and_says_why() -> None:
    clock = FakeClock()
    w = world(16, 24, clock=clock, planner=LoadPlanner(learnt(), CHUNK, clock))
    for document in "abcdefgh":
        read(w, document)
    moved(Route.DISK_TO_HOST, 1, 1000.0, w.clock.now, w.transfers)
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)
    assert hit.num_tokens == DOCUMENT

    worth = w.cache.plans.worth_loading(hit, DOCUMENT + 1)
    promotion = w.cache.promote(worth)
    w.settle()

    assert balance(promotion) == (0, 0, 0, DOCUMENT + 1)
    assert promotion.balance(DOCUMENT + 1).reasons == {Reason.COST: DOCUMENT, Reason.LAST_BLOCK: 1}
    w.cache.release(promotion.tables)
    w.check()


def test_demand_is_what_each_prefix_has_to_move() -> None:
    w = world(num_device_slots=16, num_host_slots=60)
    read(w, "a")
    w.flush()
    names = w.names("a", DOCUMENT)
    w.cache.residency.groups[0].slots.evict(
        w.cache.residency.groups[0].pool.find_all(names[4:]).tolist(), EvictionCause.ROOM
    )
    host = w.index.host
    assert host is not None
    host[0].evict(host[0].pool.find_all(names[7:]).tolist(), EvictionCause.ROOM)
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)

    demand = demand_of(w, hit)

    assert demand is not None
    assert demand.ends.tolist() == [16, 20, 24, 28, 32, 36, 40]
    num_blocks = {route: (moves.num_bytes / BLOCK_BYTES).tolist() for route, moves in demand.moves.items()}
    assert num_blocks[Route.HOST_TO_DEVICE] == [0, 1, 2, 3, 4, 5, 6]
    assert num_blocks[Route.DISK_TO_HOST] == [0, 0, 0, 0, 1, 2, 3]
    assert w.cache.lookups.where(hit.chain) == [Tier.DEVICE] * 4 + [Tier.HOST] * 3 + [Tier.DISK] * 3


def test_a_hit_that_is_all_on_the_device_needs_no_plan() -> None:
    w = world()
    read(w, "a")
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)

    assert demand_of(w, hit) is None


def test_every_missed_token_has_the_reason_that_made_the_prefix_shorter_there() -> None:
    misses = Misses(((100, Reason.NEVER_SEEN),)).cut(60, Reason.COST).cut(20, Reason.CORRUPT)

    assert misses.after(10) == {Reason.CORRUPT: 10, Reason.COST: 40, Reason.NEVER_SEEN: 40}
    assert misses.after(70) == {Reason.NEVER_SEEN: 30}
    assert misses.after(100) == {}
    assert misses.first(30) is Reason.COST
    assert misses.first(100) is Reason.LAST_BLOCK
