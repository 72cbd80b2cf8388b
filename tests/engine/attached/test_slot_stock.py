"""Slots reserved ahead: no more than are used, and none kept from others."""

import numpy as np
import pytest
from chaos import FakeClock

from kvtier.engine.attached.slot_stock import IDLE_S, MAX_PART, RETRY_S, SlotStock


class Bed:
    def __init__(self, num_slots: int, num_kept: int = 0) -> None:
        self.clock = FakeClock()
        self.asked: list[int] = []
        self.stock = SlotStock(num_slots, self.asked.append, self.clock, num_kept)


def test_what_is_kept_lies_ready_also_while_nothing_is_used() -> None:
    bed = Bed(8 * MAX_PART, num_kept=5)
    bed.stock.fill()
    bed.stock.fill()
    bed.stock.on_reserved(5, [1, 2, 3, 4, 5])
    assert bed.stock.take(2) == [1, 2]
    assert bed.asked == [5], "most of what is kept is still there"
    assert bed.stock.take(1) == [3]
    bed.stock.on_reserved(3, [6, 7, 8])

    bed.clock.now += 2 * IDLE_S

    assert bed.asked == [5, 3]
    assert bed.stock.pop_idle() == []
    assert len(bed.stock.take(5)) == 5


def test_a_sidecar_without_room_is_asked_again_after_a_while() -> None:
    bed = Bed(8 * MAX_PART, num_kept=5)
    bed.stock.fill()
    bed.clock.now += 10.0  # the answer was long in coming
    bed.stock.on_reserved(5, [])
    bed.stock.fill()
    assert bed.asked == [5]

    bed.clock.now += 2 * RETRY_S
    bed.stock.fill()

    assert bed.asked == [5, 5]


def test_what_is_kept_is_asked_for_at_once_where_there_was_room() -> None:
    bed = Bed(8 * MAX_PART, num_kept=8)
    bed.stock.fill()
    bed.stock.on_reserved(8, range(8))

    bed.stock.take_ready()  # as before a clear
    bed.stock.fill()

    assert bed.asked == [8, 8], "no time has passed"


def test_when_half_of_what_is_kept_is_gone_it_is_asked_for() -> None:
    bed = Bed(8 * MAX_PART, num_kept=8)
    bed.stock.fill()
    bed.stock.on_reserved(8, range(8))

    assert len(bed.stock.take(3)) == 3
    bed.stock.fill()
    assert bed.asked == [8]
    bed.stock.take(1)

    assert bed.asked == [8, 4]


def test_what_was_taken_and_is_less_than_half_is_asked_for_once_none_is_used() -> None:
    bed = Bed(8 * MAX_PART, num_kept=8)
    bed.stock.fill()
    bed.stock.on_reserved(8, range(8))
    bed.stock.take(2)

    bed.clock.now += 2 * IDLE_S
    bed.stock.fill()

    assert bed.asked == [8, 2]


def test_an_answer_says_whether_there_was_room() -> None:
    bed = Bed(8 * MAX_PART, num_kept=4)
    assert bed.stock.has_room

    bed.stock.fill()
    bed.stock.on_reserved(4, [1, 2, 3])
    assert not bed.stock.has_room

    bed.stock.take(3)
    bed.stock.on_reserved(4, [4, 5, 6, 7])
    assert bed.stock.has_room


def test_what_lacks_is_asked_for_once_and_lent_when_it_has_come() -> None:
    bed = Bed(8)

    assert bed.stock.take(5) == []
    assert bed.stock.take(5) == []
    assert bed.asked == [5]
    assert bed.stock.is_waiting

    bed.stock.on_reserved(5, [1, 2, 3])
    assert bed.stock.take(2) == [1, 2]
    assert bed.stock.lent == {1, 2}
    assert not bed.stock.is_waiting


def test_with_much_room_as_much_again_is_kept_ready() -> None:
    bed = Bed(1600)

    bed.stock.take(10)
    bed.stock.on_reserved(20, range(20))

    assert bed.stock.take(10) == list(range(10))
    assert bed.asked == [20]
    assert bed.stock.take(10) == list(range(10, 20))
    assert bed.asked == [20, 10]


def test_what_lies_ready_and_is_not_used_goes_back() -> None:
    bed = Bed(8)
    bed.stock.take(3)
    bed.stock.on_reserved(3, [4, 5, 6])
    assert bed.stock.pop_idle() == []

    bed.clock.now += IDLE_S * 1.5

    assert bed.stock.pop_idle() == [4, 5, 6]
    assert bed.stock.take(1) == []


def test_a_slot_that_was_not_lent_cannot_be_given_back() -> None:
    bed = Bed(8)
    bed.stock.take(1)
    bed.stock.on_reserved(1, [3])
    bed.stock.take(1)

    bed.stock.return_lent_slots(np.array([3]))

    with pytest.raises(AssertionError, match="not reserved"):
        bed.stock.return_lent_slots(np.array([3]))
