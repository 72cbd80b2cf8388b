"""CircuitBreaker: when a failing disk is left alone, for how long, and what late outcomes may not do."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from chaos import FakeClock

from kvtier.tiers.lower.breaker import MAX_FAILURES, MAX_REST_S, REST_S, Attempt, BreakerState, CircuitBreaker


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def breaker(clock: FakeClock) -> CircuitBreaker:
    return CircuitBreaker(clock)


def begin(breaker: CircuitBreaker) -> Attempt:
    attempt = breaker.begin()
    assert attempt is not None
    return attempt


def open_by_hang(breaker: CircuitBreaker) -> None:
    breaker.on_hung(begin(breaker))


def rest_s(breaker: CircuitBreaker, clock: FakeClock) -> float:
    """For how long the breaker, which is open, stays so; moves the clock to the end of that."""
    start = clock.now
    while breaker.state is BreakerState.OPEN:
        clock.now += 0.5
    return clock.now - start


def test_a_breaker_that_saw_nothing_allows_everything(breaker: CircuitBreaker) -> None:
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allows()
    assert [breaker.begin() is None for _ in range(10)] == [False] * 10


def test_a_few_failures_do_not_open_it(breaker: CircuitBreaker) -> None:
    for _ in range(MAX_FAILURES - 1):
        breaker.on_failed(begin(breaker))

    assert breaker.state is BreakerState.CLOSED


def test_failures_in_a_row_open_it(breaker: CircuitBreaker) -> None:
    for _ in range(MAX_FAILURES):
        breaker.on_failed(begin(breaker))

    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows()
    assert breaker.begin() is None
    assert breaker.num_opened == 1


def test_a_success_between_failures_starts_the_count_again(breaker: CircuitBreaker) -> None:
    for _ in range(10):
        for _ in range(MAX_FAILURES - 1):
            breaker.on_failed(begin(breaker))
        breaker.on_succeeded(begin(breaker))

    assert breaker.state is BreakerState.CLOSED


def test_how_many_failures_it_takes_can_be_said(clock: FakeClock) -> None:
    breaker = CircuitBreaker(clock, max_failures=1)

    breaker.on_failed(begin(breaker))

    assert breaker.state is BreakerState.OPEN


def test_a_breaker_that_is_open_from_the_start_is_refused(clock: FakeClock) -> None:
    with pytest.raises(ValueError, match="max_failures must be at least 1, not 0"):
        CircuitBreaker(clock, max_failures=0)


def test_one_hang_opens_it(breaker: CircuitBreaker) -> None:
    open_by_hang(breaker)

    assert breaker.state is BreakerState.OPEN


def test_after_the_rest_it_is_half_open_without_being_asked(breaker: CircuitBreaker, clock: FakeClock) -> None:
    open_by_hang(breaker)

    clock.now += REST_S - 0.001
    before = breaker.state
    clock.now += 0.001

    assert (before, breaker.state) == (BreakerState.OPEN, BreakerState.HALF_OPEN)


def test_half_open_exactly_one_probe_is_let_through(breaker: CircuitBreaker, clock: FakeClock) -> None:
    open_by_hang(breaker)
    clock.now += REST_S

    assert breaker.allows()
    assert breaker.begin() is not None
    assert not breaker.allows()
    assert breaker.begin() is None

    clock.now += 10 * MAX_REST_S  # however long the probe takes

    assert breaker.begin() is None
    assert breaker.state is BreakerState.HALF_OPEN


def test_asking_whether_it_allows_takes_no_probe(breaker: CircuitBreaker, clock: FakeClock) -> None:
    open_by_hang(breaker)
    clock.now += REST_S

    assert [breaker.allows() for _ in range(5)] == [True] * 5
    assert breaker.begin() is not None


def test_a_probe_that_succeeds_closes_it(breaker: CircuitBreaker, clock: FakeClock) -> None:
    open_by_hang(breaker)
    clock.now += REST_S

    breaker.on_succeeded(begin(breaker))

    assert breaker.state is BreakerState.CLOSED
    assert breaker.num_opened == 1


def test_a_probe_that_fails_opens_it_again_at_once(breaker: CircuitBreaker, clock: FakeClock) -> None:
    open_by_hang(breaker)
    clock.now += REST_S

    breaker.on_failed(begin(breaker))

    assert breaker.state is BreakerState.OPEN
    assert breaker.num_opened == 2


@pytest.mark.parametrize("outcome", [CircuitBreaker.on_failed, CircuitBreaker.on_hung])
def test_the_rest_doubles_up_to_a_limit_while_probes_fail(
    breaker: CircuitBreaker, clock: FakeClock, outcome: Callable[[CircuitBreaker, Attempt], None]
) -> None:
    open_by_hang(breaker)
    rests = [rest_s(breaker, clock)]

    for _ in range(8):
        outcome(breaker, begin(breaker))
        rests.append(rest_s(breaker, clock))

    assert rests == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_after_a_success_the_rest_is_short_again(breaker: CircuitBreaker, clock: FakeClock) -> None:
    open_by_hang(breaker)
    for _ in range(4):
        rest_s(breaker, clock)
        breaker.on_failed(begin(breaker))
    rest_s(breaker, clock)
    breaker.on_succeeded(begin(breaker))

    open_by_hang(breaker)

    assert rest_s(breaker, clock) == REST_S


def test_after_a_success_it_takes_all_failures_again(breaker: CircuitBreaker, clock: FakeClock) -> None:
    for _ in range(MAX_FAILURES):
        breaker.on_failed(begin(breaker))
    clock.now += REST_S
    breaker.on_succeeded(begin(breaker))

    breaker.on_failed(begin(breaker))

    assert breaker.state is BreakerState.CLOSED


def test_a_late_success_does_not_close_it(breaker: CircuitBreaker, clock: FakeClock) -> None:
    old = begin(breaker)
    open_by_hang(breaker)

    breaker.on_succeeded(old)
    while_open = breaker.state
    clock.now += REST_S
    breaker.on_succeeded(old)
    before_the_probe = breaker.state
    begin(breaker)
    breaker.on_succeeded(old)

    assert (while_open, before_the_probe, breaker.state) == (
        BreakerState.OPEN,
        BreakerState.HALF_OPEN,
        BreakerState.HALF_OPEN,
    )


def test_late_failures_and_hangs_do_not_lengthen_the_rest(breaker: CircuitBreaker, clock: FakeClock) -> None:
    old = [begin(breaker) for _ in range(20)]
    open_by_hang(breaker)
    clock.now += REST_S / 2

    for attempt in old[:10]:
        breaker.on_failed(attempt)
    for attempt in old[10:]:
        breaker.on_hung(attempt)

    assert rest_s(breaker, clock) == REST_S / 2
    assert breaker.num_opened == 1


def test_late_failures_do_not_end_the_probe(breaker: CircuitBreaker, clock: FakeClock) -> None:
    old = [begin(breaker) for _ in range(5)]
    open_by_hang(breaker)
    clock.now += REST_S
    probe = begin(breaker)

    for attempt in old:
        breaker.on_failed(attempt)
    breaker.on_succeeded(probe)

    assert breaker.state is BreakerState.CLOSED


def test_failures_from_before_it_opened_do_not_count_after_it_closed(breaker: CircuitBreaker, clock: FakeClock) -> None:
    old = [begin(breaker) for _ in range(5)]
    open_by_hang(breaker)
    clock.now += REST_S
    breaker.on_succeeded(begin(breaker))

    for attempt in old:
        breaker.on_failed(attempt)

    assert breaker.state is BreakerState.CLOSED


def test_a_hung_operation_that_ends_after_all_changes_nothing(breaker: CircuitBreaker, clock: FakeClock) -> None:
    attempt = begin(breaker)
    breaker.on_hung(attempt)

    breaker.on_succeeded(attempt)
    after_its_success = breaker.state
    clock.now += REST_S
    probe = begin(breaker)
    breaker.on_hung(probe)
    breaker.on_succeeded(probe)

    assert (after_its_success, breaker.state) == (BreakerState.OPEN, BreakerState.OPEN)


def test_a_probe_s_outcome_counts_once(breaker: CircuitBreaker, clock: FakeClock) -> None:
    open_by_hang(breaker)
    clock.now += REST_S
    probe = begin(breaker)
    breaker.on_succeeded(probe)

    breaker.on_hung(probe)

    assert breaker.state is BreakerState.CLOSED


def test_of_a_batch_of_failures_only_the_first_few_count(breaker: CircuitBreaker, clock: FakeClock) -> None:
    attempts = [begin(breaker) for _ in range(4 * MAX_FAILURES)]

    for attempt in attempts:
        breaker.on_failed(attempt)

    assert breaker.num_opened == 1
    assert rest_s(breaker, clock) == REST_S


def test_a_probe_that_was_never_started_leaves_room_for_another(breaker: CircuitBreaker, clock: FakeClock) -> None:
    open_by_hang(breaker)
    clock.now += REST_S
    first = begin(breaker)

    breaker.withdraw(first)
    second = begin(breaker)
    breaker.on_succeeded(first)
    after_the_first = breaker.state
    breaker.on_succeeded(second)

    assert (after_the_first, breaker.state) == (BreakerState.HALF_OPEN, BreakerState.CLOSED)


def test_an_operation_that_was_never_started_neither_fails_nor_succeeds(breaker: CircuitBreaker) -> None:
    breaker.on_failed(begin(breaker))
    breaker.on_failed(begin(breaker))
    breaker.withdraw(begin(breaker))
    before = breaker.state
    breaker.on_failed(begin(breaker))

    assert (before, breaker.state) == (BreakerState.CLOSED, BreakerState.OPEN)


@dataclass
class Model:
    """The rules, written down as told: each attempt carries the opening it began after, and whether it is a probe."""

    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    opened: int = 0
    rest_s: float = REST_S
    until: float = 0.0
    probe: int | None = None

    def at(self, now: float) -> BreakerState:
        if self.state is BreakerState.OPEN and now >= self.until:
            self.state, self.probe = BreakerState.HALF_OPEN, None
        return self.state

    def open(self, now: float) -> None:
        self.state, self.until, self.probe = BreakerState.OPEN, now + self.rest_s, None
        self.rest_s, self.failures = min(MAX_REST_S, self.rest_s * 2), 0
        self.opened += 1


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_agree_with_the_rules_as_told(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    clock, model = FakeClock(), Model()
    breaker = CircuitBreaker(clock)
    under_way: list[tuple[Attempt, int, int]] = []  # attempt, the opening it began after, its number
    seen = set()

    for number in range(4_000):
        clock.now += rng.choice([0, 0, 0, 0.01, 0.3, 2, 40])
        state = model.at(clock.now)
        seen.add(state)
        assert breaker.state is state
        assert breaker.num_opened == model.opened
        may_begin = state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and model.probe is None)
        assert breaker.allows() == may_begin

        if rng.random() < 0.5:
            attempt = breaker.begin()
            assert (attempt is not None) == may_begin
            if attempt is not None:
                under_way.append((attempt, model.opened, number))
                model.probe = number if state is BreakerState.HALF_OPEN else None
        elif under_way:
            attempt, opening, its_number = under_way.pop(rng.randrange(len(under_way)))
            outcome = rng.choices(["on_succeeded", "on_failed", "on_hung", "withdraw"], [5, 4, 1, 1])[0]
            getattr(breaker, outcome)(attempt)
            is_probe = model.probe == its_number
            counts = is_probe or (state is BreakerState.CLOSED and opening == model.opened)
            if not counts:
                pass
            elif outcome == "withdraw":
                model.probe = None
            elif outcome == "on_hung" or (outcome == "on_failed" and (is_probe or model.failures == MAX_FAILURES - 1)):
                model.open(clock.now)
            elif outcome == "on_failed":
                model.failures += 1
            elif is_probe:
                model.state, model.probe, model.rest_s = BreakerState.CLOSED, None, REST_S
            else:
                model.failures = 0
        breaker.check()

    assert seen == set(BreakerState)
