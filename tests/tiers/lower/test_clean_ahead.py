"""CleanAhead: the window follows what is allocated while a spill is under way, by a fake clock."""

import pytest

from kvtier.tiers.lower.copies import HEADROOM, RATE_MEMORY_S, CleanAhead

MIN, MAX = 32, 20_000


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def allocate_steadily(window: CleanAhead, clock: FakeClock, blocks_per_s: float, seconds: float = 20.0) -> None:
    step_s = 0.01
    for _ in range(round(seconds / step_s)):
        clock.now += step_s
        window.on_allocated(round(blocks_per_s * step_s))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def window(clock: FakeClock) -> CleanAhead:
    return CleanAhead(MIN, MAX, clock)


def test_before_anything_is_measured_the_window_is_the_least(window: CleanAhead) -> None:
    assert window.num_blocks == MIN


def test_allocations_alone_do_not_widen_the_window(window: CleanAhead, clock: FakeClock) -> None:
    allocate_steadily(window, clock, 100_000)

    assert window.num_blocks == MIN


def test_spills_alone_do_not_widen_the_window(window: CleanAhead) -> None:
    window.on_spilled(60.0)

    assert window.num_blocks == MIN


def test_slow_allocation_never_narrows_the_window_below_the_least(window: CleanAhead, clock: FakeClock) -> None:
    window.on_spilled(0.001)

    allocate_steadily(window, clock, 100)

    assert window.num_blocks == MIN


def test_the_window_is_never_wider_than_the_most(window: CleanAhead, clock: FakeClock) -> None:
    window.on_spilled(60.0)

    allocate_steadily(window, clock, 100_000)

    assert window.num_blocks == MAX


def test_a_pool_smaller_than_the_least_window_is_the_window(clock: FakeClock) -> None:
    assert CleanAhead(MIN, 5, clock).num_blocks == 5


@pytest.mark.parametrize(("blocks_per_s", "spill_s"), [(10_000, 0.1), (20_000, 0.1), (10_000, 0.2), (5_000, 1.0)])
def test_the_window_is_what_is_allocated_during_a_spill_with_headroom(
    window: CleanAhead, clock: FakeClock, blocks_per_s: int, spill_s: float
) -> None:
    window.on_spilled(spill_s)

    allocate_steadily(window, clock, blocks_per_s)

    assert window.num_blocks == pytest.approx(HEADROOM * blocks_per_s * spill_s, rel=0.02)


def test_a_burst_at_one_moment_counts_as_much_as_the_same_blocks_one_by_one(clock: FakeClock) -> None:
    at_once, one_by_one = CleanAhead(1, MAX, clock), CleanAhead(1, MAX, clock)
    for window in (at_once, one_by_one):
        window.on_spilled(1.0)

    at_once.on_allocated(500)
    for _ in range(500):
        one_by_one.on_allocated(1)

    assert at_once.num_blocks == pytest.approx(one_by_one.num_blocks, abs=1)


def test_the_window_narrows_as_allocation_slows_down(window: CleanAhead, clock: FakeClock) -> None:
    window.on_spilled(0.1)
    allocate_steadily(window, clock, 20_000)
    wide = window.num_blocks

    allocate_steadily(window, clock, 5_000)

    assert window.num_blocks == pytest.approx(wide / 4, rel=0.02)


def test_the_window_narrows_while_nothing_is_allocated(window: CleanAhead, clock: FakeClock) -> None:
    window.on_spilled(0.1)
    allocate_steadily(window, clock, 20_000)
    wide = window.num_blocks

    clock.now += RATE_MEMORY_S

    assert window.num_blocks == pytest.approx(wide / 2.718, rel=0.02)


def test_a_long_idle_time_brings_the_window_back_to_the_least(window: CleanAhead, clock: FakeClock) -> None:
    window.on_spilled(0.1)
    allocate_steadily(window, clock, 20_000)

    clock.now += 3600.0

    assert window.num_blocks == MIN


def test_asking_for_the_window_does_not_change_it(window: CleanAhead, clock: FakeClock) -> None:
    window.on_spilled(0.1)
    allocate_steadily(window, clock, 20_000)
    clock.now += 0.5

    assert len({window.num_blocks for _ in range(5)}) == 1


def test_one_slow_spill_widens_the_window_less_than_many(window: CleanAhead, clock: FakeClock) -> None:
    window.on_spilled(0.1)
    allocate_steadily(window, clock, 10_000)
    before = window.num_blocks

    window.on_spilled(1.0)
    after_one = window.num_blocks
    for _ in range(100):
        window.on_spilled(1.0)

    assert before < after_one < window.num_blocks == pytest.approx(10 * before, rel=0.02)
