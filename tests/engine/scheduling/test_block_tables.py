"""Block tables: every block has a slot, but of recurrent states only those that are written or may be read again."""

from array import array

import pytest

from kvtier.engine.scheduling.block_tables import extend_table, num_new_slots
from kvtier.tiers.naming.groups import FullAttention, RecurrentState
from kvtier.tiers.up.promotion import NO_SLOT

_ = NO_SLOT


@pytest.mark.parametrize(
    ("table", "num_computed", "num_tokens", "expected"),
    [
        ([], 0, 10, [7]),
        ([], 0, 70, [_, _, _, _, 7]),  # only the state at the chunk's end
        ([3], 10, 16, [3]),  # in the same block
        ([3], 10, 17, [_, 3]),  # the state in the middle of a block is not needed any more
        ([3], 10, 70, [_, _, _, _, 3]),
        ([3], 16, 17, [3, 7]),  # the state at the end of a block may be read again
        ([_, 3], 32, 100, [_, 3, _, _, _, _, 7]),
    ],
)
def test_a_state_moves_within_its_block_and_gets_a_new_slot_after_it(
    table: list[int], num_computed: int, num_tokens: int, expected: list[int]
) -> None:
    group, slots = RecurrentState(16), array("i", table)

    num_new = num_new_slots(group, slots, num_computed, num_tokens)
    extend_table(group, slots, [7][:num_new], num_computed, num_tokens)

    assert slots.tolist() == expected


def test_every_block_of_keys_and_values_has_a_slot() -> None:
    group, slots = FullAttention(16), array("i", [3])

    assert num_new_slots(group, slots, 10, 40) == 2
    extend_table(group, slots, [5, 6], 10, 40)

    assert slots.tolist() == [3, 5, 6]
    assert num_new_slots(group, slots, 40, 48) == 0
