"""Growth of a request's block tables before each chunk of tokens that a step computes."""

from collections.abc import Sequence

from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.up.promotion import NO_SLOT, Table


def num_new_slots(group: AttentionGroup, table: Table, num_computed: int, num_tokens: int) -> int:
    """Return how many new slots a request needs in a group, to compute the tokens *num_computed* to *num_tokens* - 1.

    A block of keys and values needs one slot. Of recurrent states, only the one at the chunk's end has a slot. It is a
    new slot if the chunk begins at the beginning of a block, because the state there may have a name and must not be
    overwritten. Otherwise the slot is reused.
    """
    num_blocks = -(-num_tokens // group.block_size) - len(table)
    if not group.keeps_states:
        return num_blocks
    return int(num_blocks > 0 and num_computed % group.block_size == 0)


def extend_table(group: AttentionGroup, table: Table, new: Sequence[int], num_computed: int, num_tokens: int) -> None:
    """Extend a request's *table* to *num_tokens* tokens, with the slots *new*, as many as `num_new_slots` returned."""
    num_blocks = -(-num_tokens // group.block_size) - len(table)
    if not group.keeps_states:
        table.extend(new)
    elif num_blocks > 0:
        if not new:  # the state is in the middle of a block; it moves to the block in which the chunk ends
            assert len(table) * group.block_size > num_computed, "no state to continue"
            new, table[-1] = [table[-1]], NO_SLOT
        table.extend([NO_SLOT] * (num_blocks - 1))
        table.extend(new)
