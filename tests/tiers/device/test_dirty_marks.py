"""DirtyMarks: the oldest marked slots, whatever was marked and cleaned in between."""

import random

import numpy as np
import pytest

from kvtier.tiers.device.group_slots import DirtyMarks


def ids(*slots: int) -> np.ndarray:
    return np.array(slots, np.intp)


def test_the_oldest_come_in_the_order_in_which_they_were_marked() -> None:
    marks = DirtyMarks(8)

    marks.add(ids(5, 2))
    marks.add(ids(7))

    assert marks.oldest(2).tolist() == [5, 2]
    assert marks.oldest(9).tolist() == [5, 2, 7]
    assert marks.oldest(0).tolist() == []


def test_a_slot_that_is_marked_twice_keeps_its_place_until_it_is_cleaned() -> None:
    marks = DirtyMarks(8)
    marks.add(ids(1, 2))

    marks.add(ids(3, 1))
    assert marks.oldest(3).tolist() == [1, 2, 3]

    marks.remove(ids(1))
    marks.add(ids(1))
    assert marks.oldest(3).tolist() == [2, 3, 1]


@pytest.mark.parametrize("seed", range(20))
def test_marks_are_those_of_a_plain_dict(seed: int) -> None:
    """What has been marked for four turnovers of all slots may count as newer than it is; nothing is lost."""
    rng = random.Random(seed)
    num_slots = rng.randint(1, 40)
    marks, plain = DirtyMarks(num_slots), dict[int, None]()

    for _ in range(300):
        slots = rng.sample(range(num_slots), rng.randint(0, min(6, num_slots)))
        if rng.random() < 0.5:
            marks.add(ids(*slots))
            plain.update(dict.fromkeys(slots))
        else:
            marks.remove(ids(*slots))
            for slot in slots:
                plain.pop(slot, None)

        marks.check()
        assert len(marks) == len(plain)
        assert set(marks.oldest(num_slots).tolist()) == set(plain)
        probe = rng.sample(range(num_slots), min(5, num_slots))
        assert marks.among(ids(*probe)).tolist() == [slot in plain for slot in probe]
        assert marks.any_among(ids(*probe)) == any(slot in plain for slot in probe)


def test_the_queue_does_not_grow_while_one_slot_stays_marked() -> None:
    marks = DirtyMarks(4)
    marks.add(ids(0))

    for _ in range(1000):
        marks.add(ids(1, 2))
        marks.remove(ids(1, 2))

        marks.check()
    assert marks.oldest(4).tolist() == [0]
