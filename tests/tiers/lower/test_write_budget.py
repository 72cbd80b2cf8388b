"""WriteBudget: how many bytes may be written, by a fake clock."""

import random

import pytest
from chaos import FakeClock

from kvtier.tiers.lower.admission import DAY_S, WriteBudget

DAYS_BYTES = 1000
HOUR_S = DAY_S / 24


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def budget(clock: FakeClock) -> WriteBudget:
    return WriteBudget(DAYS_BYTES, clock)


def test_a_new_budget_has_one_day_s_bytes_at_once(budget: WriteBudget) -> None:
    assert budget.left_bytes == DAYS_BYTES
    assert budget.allows(DAYS_BYTES)
    assert not budget.allows(DAYS_BYTES + 1)


def test_what_is_spent_is_not_left(budget: WriteBudget) -> None:
    budget.spend(400)
    budget.spend(100)

    assert budget.left_bytes == 500


def test_asking_spends_nothing(budget: WriteBudget) -> None:
    for _ in range(10):
        budget.allows(DAYS_BYTES)
        budget.spares(DAYS_BYTES)

    assert budget.left_bytes == DAYS_BYTES


def test_it_refills_evenly(budget: WriteBudget, clock: FakeClock) -> None:
    budget.spend(DAYS_BYTES)

    left = []
    for _ in range(4):
        clock.now += 6 * HOUR_S
        left.append(budget.left_bytes)

    assert left == [250, 500, 750, 1000]


def test_many_small_refills_make_as_much_as_a_large_one(budget: WriteBudget, clock: FakeClock) -> None:
    budget.spend(DAYS_BYTES)
    for _ in range(10_000):
        clock.now += DAY_S / 20_000
        budget.spend(0)

    assert budget.left_bytes == pytest.approx(DAYS_BYTES / 2, abs=1)


def test_a_long_idle_time_saves_up_one_day_and_no_more(budget: WriteBudget, clock: FakeClock) -> None:
    budget.spend(DAYS_BYTES)

    clock.now += 100 * DAY_S

    assert budget.left_bytes == DAYS_BYTES


def test_the_reserve_is_there_for_what_matters_more(budget: WriteBudget) -> None:
    budget.spend(700)

    assert [budget.spares(num_bytes) for num_bytes in (50, 51)] == [True, False]
    assert [budget.allows(num_bytes) for num_bytes in (51, 300, 301)] == [True, True, False]


def test_what_was_overdrawn_is_paid_back_first(budget: WriteBudget, clock: FakeClock) -> None:
    budget.spend(DAYS_BYTES + 500)

    clock.now += DAY_S / 2
    before = budget.left_bytes, budget.allows(1)
    clock.now += HOUR_S

    assert before == (0, False)
    assert budget.allows(1)


def test_no_limit_allows_everything(clock: FakeClock) -> None:
    budget = WriteBudget(None, clock)
    budget.spend(1 << 60)

    assert budget.left_bytes is None
    assert budget.allows(1 << 60)
    assert budget.spares(1 << 60)


def test_a_budget_of_nothing_allows_nothing(clock: FakeClock) -> None:
    budget = WriteBudget(0, clock)
    clock.now += 10 * DAY_S

    assert not budget.allows(1)
    assert not budget.spares(1)


@pytest.mark.parametrize(("written", "left"), [(0, 1000), (300, 700), (1000, 0), (1500, 0)])
def test_after_a_restart_what_was_written_in_the_last_day_counts(clock: FakeClock, written: int, left: int) -> None:
    assert WriteBudget(DAYS_BYTES, clock, written).left_bytes == left


def test_restarting_every_hour_gives_nothing_away(clock: FakeClock) -> None:
    written: list[tuple[float, int]] = []
    for _ in range(24 * 10):
        last_day = sum(num_bytes for at, num_bytes in written if at > clock.now - DAY_S)
        budget = WriteBudget(DAYS_BYTES, clock, last_day)
        while budget.allows(10):
            budget.spend(10)
            written.append((clock.now, 10))
        clock.now += HOUR_S

    assert sum(num_bytes for _, num_bytes in written) <= (10 + 1) * DAYS_BYTES


@pytest.mark.parametrize(("bytes_per_day", "written"), [(-1, 0), (1000, -1)])
def test_negative_figures_are_refused(clock: FakeClock, bytes_per_day: int, written: int) -> None:
    with pytest.raises(ValueError, match="neither can be negative"):
        WriteBudget(bytes_per_day, clock, written)


@pytest.mark.parametrize("seed", range(5))
def test_in_any_number_of_days_one_day_s_bytes_more_are_written_at_most(seed: int, clock: FakeClock) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    budget = WriteBudget(DAYS_BYTES, clock)
    written = 0

    for _ in range(3000):
        clock.now += rng.choice([0, 1, 60, HOUR_S, DAY_S if rng.random() < 0.05 else 0])
        num_bytes = rng.randrange(200)
        assert budget.allows(num_bytes) or not budget.spares(num_bytes)
        if rng.choice([budget.allows, budget.spares])(num_bytes):
            budget.spend(num_bytes)
            written += num_bytes
        budget.check()

        assert written <= (clock.now / DAY_S + 1) * DAYS_BYTES + 1e-6
