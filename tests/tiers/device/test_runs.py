"""Runs: names are found, told and let go as whole chains, and no block keeps more names than its part of them."""

import sys

import numpy as np
import pytest

from kvtier.tiers.device import eviction_order
from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.device.eviction_order import Runs
from kvtier.tiers.device.slot_ids import ABSENT
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


def row(names: list[BlockName], start: int, end: int) -> tuple[list[BlockName], int]:
    """The list of a row's names, with the name of the block before it, and where in the list the row starts."""
    return names[max(0, start - 1) : end], min(1, start)


def put_rows(pool: BlockPool, names: list[BlockName], rows: list[tuple[int, int]]) -> list[int]:
    """Put the rows of a prompt into the pool one after another; the slot of each block."""
    slots = [-1] * len(names)
    for start, end in rows:
        own = pool.allocate(end - start) or []
        assert pool.commit_row(np.array(own), *row(names, start, end)) == []
        slots[start:end] = own
    return slots


LAST_FIRST = [(96, 100), (64, 96), (63, 64), (32, 63), (0, 32)]


@pytest.mark.parametrize("rows", [LAST_FIRST, LAST_FIRST[::-1], [(32, 64), (64, 100), (0, 32)], [(99, 100), (0, 99)]])
def test_the_rows_of_a_prompt_are_joined_in_one_run_if_each_touches_the_ones_before(
    rows: list[tuple[int, int]],
) -> None:
    pool, names = BlockPool(200), chain(100)

    slots = put_rows(pool, names, rows)

    pool.check()
    assert pool.find_all(names).tolist() == slots
    (whole,) = pool.rows(np.array(slots[::-1]))
    assert (whole.names, whole.parent) == (names[::-1], None)
    assert pool.parent(slots[1]) == names[0]


def test_rows_with_a_gap_between_are_joined_on_one_side_of_what_fills_it() -> None:
    pool, names = BlockPool(200), chain(100)

    slots = put_rows(pool, names, [(0, 40), (60, 100), (40, 60)])

    pool.check()
    assert pool.find_all(names).tolist() == slots
    assert len(pool.rows(np.array(slots[::-1]))) == 2


def test_two_prompts_with_the_same_beginning_are_not_mixed_up() -> None:
    pool, one = BlockPool(200), chain(40)
    other = one[:20] + [BlockName(bytes([100 + i]) * 32) for i in range(20)]
    tails = put_rows(pool, one, [(20, 40)])[20:], put_rows(pool, other, [(20, 40)])[20:]

    head = put_rows(pool, one, [(0, 20)])[:20]

    pool.check()
    assert [pool.find_all(names).tolist() for names in (one, other)] == [head + tail for tail in tails]


def test_a_block_of_a_row_that_is_there_already_stays_where_it_is() -> None:
    pool, names = BlockPool(20), chain(10)
    there = put_rows(pool, names, [(4, 6)])[4:6]
    own = pool.allocate(10) or []

    assert pool.commit_row(np.array(own), *row(names, 0, 10)) == [4, 5]

    pool.check()
    assert pool.find_all(names).tolist() == [*own[:4], *there, *own[6:]]


def test_a_run_goes_on_at_its_front_after_its_tail_was_evicted_and_keeps_no_names_of_it() -> None:
    pool, names = BlockPool(100), chain(100)
    before = num_references(names)
    slots = put_rows(pool, names, [(60, 100), (50, 60)])
    pool.evict(slots[:49:-1][:45])
    pool.check()
    assert num_references(names)[55:] == before[55:]

    slots[:50] = put_rows(pool, names, [(20, 50), (0, 20)])[:50]

    pool.check()
    assert pool.find_all(names)[:55].tolist() == slots[:55]
    assert len(pool.rows(np.array(slots[54::-1]))) == 1


def test_a_run_of_joined_rows_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction_order, "MAX_JOINED", 20)
    pool, names = BlockPool(100), chain(60)

    slots = put_rows(pool, names, [(start, start + 10) for start in (20, 10, 0, 30, 40, 50)])

    pool.check()
    assert pool.find_all(names).tolist() == slots
    assert len(pool.rows(np.array(slots[::-1]))) == 4


def test_what_a_pool_had_before_it_was_cleared_is_not_joined_to_what_comes() -> None:
    pool, names = BlockPool(100), chain(40)
    put_rows(pool, names, [(20, 40)])
    pool.clear()

    slots = put_rows(pool, names, [(0, 20)])[:20]

    pool.check()
    assert pool.find_all(names).tolist() == slots + [ABSENT] * 20
