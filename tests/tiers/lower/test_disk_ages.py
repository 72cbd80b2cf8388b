"""How long ago blocks had been written when the disk dropped them."""

import pytest

from kvtier.tiers.lower.disk_tier import EVERY_S, MAX_MARKERS, DiskAges
from kvtier.tiers.naming.block_hash import BlockName


def name(number: int) -> BlockName:
    return BlockName(number.to_bytes(32, "big"))


def test_what_is_dropped_counts_with_the_age_of_the_one_that_was_remembered() -> None:
    now = 0.0
    ages = DiskAges(lambda: now)
    for number in range(1000):
        now += 0.1
        ages.on_written([name(number)])

    for number in range(1000):
        now += 0.1
        ages.on_dropped(name(number))

    found = ages.statistics()
    assert found.num_values == pytest.approx(1000, abs=EVERY_S / 0.1)
    assert found.total / found.num_values == pytest.approx(100, rel=0.02)


def test_blocks_of_an_earlier_process_have_no_age() -> None:
    ages = DiskAges(lambda: 5.0)

    for number in range(100):
        ages.on_dropped(name(number))

    assert ages.statistics().num_values == 0


def test_what_is_remembered_is_bounded_and_still_right() -> None:
    now, num_blocks = 0.0, 4 * MAX_MARKERS
    ages = DiskAges(lambda: now)
    for number in range(num_blocks):
        now += EVERY_S
        ages.on_written([name(number)])

    for number in range(num_blocks):
        ages.on_dropped(name(number))

    assert ages.statistics().num_values == pytest.approx(num_blocks, rel=0.01)
    assert ages.statistics().total == pytest.approx(num_blocks * now / 2, rel=0.02)
