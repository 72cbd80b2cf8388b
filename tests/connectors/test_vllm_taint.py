"""Which of vLLM's pages are tainted, and how many tokens of a request are good."""

from kvtier.connectors.vllm_connector.taint import Placement, Taint
from kvtier.tiers.naming.groups import FullAttention, SlidingWindow

TWO_GROUPS = (FullAttention(4), SlidingWindow(4, 9))


def test_a_second_failure_counts_if_it_is_nearer_to_the_beginning() -> None:
    taint = Taint(TWO_GROUPS[:1])
    placement = taint.place([[1, 2, 3, 4]], 0)

    assert taint.spread([4], [placement]) == [placement]
    assert placement.num_good == 12
    assert taint.spread([3], [placement]) == [placement]
    assert placement.num_good == 8
    assert taint.spread([4], [placement]) == []
    assert placement.num_good == 8


def test_the_first_tainted_page_of_any_group_counts() -> None:
    taint = Taint(TWO_GROUPS)
    placement = taint.place([[1, 2, 3, 4], [0, 5, 6, 7]], 0)

    taint.spread([3, 5], [placement])

    assert (placement.limit(3), placement.limit(16)) == (3, 4)


def test_a_page_that_a_tainted_request_is_given_later_is_tainted() -> None:
    taint = Taint(TWO_GROUPS[:1])
    placement = taint.place([[1, 2]], 0)
    taint.spread([2], [placement])

    placement.pages = [[1, 2, 3]]
    taint.on_computed(placement, 8, 12)

    assert taint.place([[4, 3]], 8).num_good == 4


def test_a_null_page_is_never_tainted() -> None:
    taint = Taint(TWO_GROUPS)
    first = taint.place([[1, 2, 3, 4], [0, 0, 6, 7]], 0)
    taint.spread([1], [first])

    other = taint.place([[8, 9], [0, 10]], 8)

    assert other.num_good is None


def test_pages_that_a_request_computes_anew_are_good_for_it_and_the_next_one() -> None:
    taint = Taint(TWO_GROUPS[:1])
    taint.spread([1, 2, 3], [])

    placement = taint.place([[1, 2, 3]], 4)
    assert placement.num_good == 0
    assert taint.place([[2, 3]], 8).num_good is None
    assert not taint.is_empty
    taint.on_computed(Placement([[1]]), 0, 4)
    assert taint.is_empty


def test_a_page_of_which_only_a_part_was_computed_anew_stays_tainted() -> None:
    taint = Taint([FullAttention(4)])
    failed = Placement([[1, 2, 3]])
    taint.spread({1, 2, 3}, [failed])

    taint.on_computed(failed, 0, 6)

    assert taint.place([[1, 2]], 8).num_good == 4


def test_of_layers_with_larger_blocks_the_block_that_has_the_hole_is_tainted_too() -> None:
    taint = Taint([FullAttention(4), FullAttention(8)])
    failed = Placement([[1, 2, 3, 4], [5, 6]])

    taint.spread({4}, [failed])

    assert failed.num_good == 8
    assert taint.place([[9, 10, 11], [7, 6]], 16).num_good == 8
