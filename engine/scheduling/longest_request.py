"""The maximum length of a prompt and its continuation together."""

from collections.abc import Sequence

from kvtier.engine.scheduling.slot_demand import max_blocks
from kvtier.tiers.naming.groups import AttentionGroup


def longest_request(
    groups: tuple[AttentionGroup, ...], num_slots: Sequence[int], chunk: int, model_limit: int | None
) -> int:
    """Return the length in tokens of the longest request that can run alone, computed in chunks of *chunk* tokens.

    *num_slots* is by group. The result is at most *model_limit*. If that is None and all layers have windows, it is
    limited as if each token needed its own slot.
    """

    def fits(num_tokens: int) -> bool:
        pairs = zip(max_blocks(groups, num_tokens, chunk), num_slots, strict=True)
        return all(blocks <= slots for blocks, slots in pairs)

    pairs = zip(groups, num_slots, strict=True)
    limit = max(group.block_size * slots for group, slots in pairs) if model_limit is None else model_limit
    if fits(limit):
        return limit
    minimum = 0  # known to fit
    while limit - minimum > 1:
        middle = (minimum + limit) // 2
        minimum, limit = (middle, limit) if fits(middle) else (minimum, middle)
    return minimum
