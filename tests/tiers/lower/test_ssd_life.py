"""SsdLife: how much of a drive's endurance has been used, and how long the rest will last."""

import math

import pytest
from chaos import FakeClock

from kvtier.tiers.lower.ssd_life import TERABYTE, YEAR_S, SsdLife


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_used_is_the_share_of_the_endurance_that_was_written(clock: FakeClock) -> None:
    life = SsdLife(600, clock, written_bytes=0)

    assert life.statistics(150 * TERABYTE).used == 0.25
    assert life.statistics(900 * TERABYTE).used == 1.5


def test_years_left_follow_the_rate_since_the_start(clock: FakeClock) -> None:
    life = SsdLife(600, clock, written_bytes=90 * TERABYTE)

    clock.now += YEAR_S / 2

    assert life.statistics(100 * TERABYTE).years_left == pytest.approx(25)


def test_while_nothing_is_written_it_lasts_for_ever(clock: FakeClock) -> None:
    life = SsdLife(600, clock, written_bytes=TERABYTE)
    clock.now += YEAR_S

    assert life.statistics(TERABYTE).years_left == math.inf


def test_at_the_moment_of_the_start_there_is_no_rate_yet(clock: FakeClock) -> None:
    assert SsdLife(600, clock, written_bytes=0).statistics(TERABYTE).years_left == math.inf


def test_a_drive_that_is_used_up_has_no_years_left(clock: FakeClock) -> None:
    life = SsdLife(1, clock, written_bytes=0)
    clock.now += 1

    assert life.statistics(2 * TERABYTE).years_left == 0


def test_an_endurance_of_nothing_is_refused(clock: FakeClock) -> None:
    with pytest.raises(ValueError, match="give a value above 0"):
        SsdLife(0, clock, written_bytes=0)
