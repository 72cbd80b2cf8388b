"""LaneSpeed: how fast a lane is thought to be, from the transfers that it has finished."""

import pytest

from kvtier.transfer.lane import LaneSpeed, Transfer


def moved(num_bytes: int, seconds: float, finished_at: float, error: Exception | None = None) -> Transfer:
    return Transfer(int, num_bytes, lambda transfer: None, error=error, seconds=seconds, finished_at=finished_at)


def test_nothing_is_known_before_the_first_transfer() -> None:
    assert LaneSpeed().bytes_per_s is None


def test_a_lane_is_as_fast_as_its_transfers() -> None:
    speed = LaneSpeed()
    for i in range(5):
        speed.update_from(moved(1000, 0.1, 10.0 * i))

    assert speed.bytes_per_s == pytest.approx(10_000)
    assert speed.measured_at == 40.0


def test_transfers_side_by_side_count_the_time_once() -> None:
    speed = LaneSpeed()
    for i in range(1, 5):
        speed.update_from(moved(1000, 0.4, 1.0 + i * 0.1))

    assert speed.bytes_per_s == pytest.approx(4000 / 0.7, rel=0.2)


def test_what_it_did_lately_counts_most() -> None:
    speed = LaneSpeed()
    for i in range(10):
        speed.update_from(moved(1000, 0.1, 1.0 + i))
    for i in range(30):
        speed.update_from(moved(100, 0.1, 20.0 + i))

    assert speed.bytes_per_s == pytest.approx(1000, rel=0.2)


def test_failures_and_transfers_of_nothing_say_nothing() -> None:
    speed = LaneSpeed()
    speed.update_from(moved(1000, 0.1, 1.0))

    speed.update_from(moved(1000, 9.0, 20.0, OSError("failed")))
    speed.update_from(moved(0, 9.0, 40.0))

    assert speed.bytes_per_s == pytest.approx(10_000)
    assert speed.measured_at == 1.0


def test_a_transfer_that_took_no_time_is_no_division_by_zero() -> None:
    speed = LaneSpeed()
    speed.update_from(moved(1000, 0.0, 1.0))

    assert speed.bytes_per_s is not None
