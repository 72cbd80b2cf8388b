"""Runs: names are found, told and let go as whole chains, and no block keeps more names than its part of them."""

import sys

import numpy as np
import pytest

from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.device.eviction_order import Runs
from kvtier.tiers.naming.block_hash import BlockName


def chain(length: int) -> list[BlockName]:
    return [BlockName(i.to_bytes(32, "big")) for i in range(length)]


def ids(*slots: int) -> np.ndarray:
    return np.array(slots, np.int32)


def num_references(names: list[BlockName]) -> list[int]:
    """How often each name is kept, here and in runs."""
    return [sys.getrefcount(name) for name in names]


def test_a_chain_named_piece_by_piece_is_one_run() -> None:
    runs, names = Runs(10), chain(5)
    runs.add(None, names, 0, ids(7, 3))
    runs.add(3, names, 2, [5])
    runs.add(5, names, 3, ids(1, 2))

    assert runs.following(7, chain(5), 0).tolist() == [7, 3, 5, 1, 2]
    assert runs.following(5, chain(5), 2).tolist() == [5, 1, 2]
    runs.check()


def test_a_chain_that_leaves_is_followed_up_to_there() -> None:
    runs, names = Runs(10), chain(4)
    runs.add(None, names, 0, ids(0, 1, 2, 3))
    other = [*chain(2), BlockName(b"x" * 32)]

    assert runs.following(0, other, 0).tolist() == [0, 1]


def test_an_evicted_tail_is_told_last_first_and_followed_no_more() -> None:
    runs, names = Runs(10), chain(4)
    runs.add(None, names, 0, ids(0, 1, 2, 3))

    assert runs.remove(ids(3, 2)) == [names[3], names[2]]
    assert runs.following(0, names, 0).tolist() == [0, 1]
    runs.check()


def test_slots_of_several_runs_and_of_none_are_removed_together() -> None:
    runs, first, second = Runs(10), chain(3), chain(9)[5:]
    runs.add(None, first, 0, ids(0, 1, 2))
    runs.add(None, second, 0, ids(4, 5, 6, 7))

    assert set(runs.remove(ids(1, 9, 6))) == {first[1], second[2]}
    assert runs.following(0, first, 0).tolist() == [0]
    runs.check()


def test_the_names_of_a_tail_that_is_gone_are_let_go() -> None:
    runs, names = Runs(100), chain(100)
    before = num_references(names)
    runs.add(None, list(names), 0, np.arange(100, dtype=np.int32))

    gone = runs.remove(np.arange(99, 9, -1, dtype=np.int32))

    assert gone == names[99:9:-1]
    del gone
    assert num_references(names) == [count + 1 for count in before[:10]] + before[10:]
    assert runs.following(0, names, 0).tolist() == list(range(10))
    assert [runs.name(slot) for slot in range(10)] == names[:10]
    assert runs.remove(ids(9, 8)) == [names[9], names[8]]
    runs.check()


def test_a_pool_goes_on_with_a_chain_whose_tail_was_evicted() -> None:
    pool, names = BlockPool(40), chain(40)
    slots = pool.allocate(40) or []
    pool.commit(slots, names)
    pool.release(slots[::-1])
    again = pool.allocate(35) or []
    pool.check()

    assert pool.commit(again, names, 5) == []

    assert pool.find_all(names).tolist() == slots[:5] + again
    pool.check()


@pytest.mark.parametrize("order", [[7, 6, 4, 3, 2, 1, 0, 5], [7, 5, 6, 3, 4], [0, 7, 1, 6, 2, 5, 3]])
def test_a_run_of_which_several_pieces_go_at_once_is_left_with_the_rest(order: list[int]) -> None:
    runs, names = Runs(8), chain(8)
    runs.add(None, names, 0, ids(*range(8)))
    slots = np.array(order, np.intp)

    gone = runs.remove_spans(slots, runs.spans(slots))

    runs.check()
    assert gone == [names[slot] for slot in order]
    left = [slot for slot in range(8) if slot not in order]
    assert [runs.name(slot) for slot in left] == [names[slot] for slot in left]
    assert [runs.parent(slot) for slot in left if slot] == [names[slot - 1] for slot in left if slot]
