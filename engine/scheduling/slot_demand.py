"""The demand for device slots: how many slots requests need, and whether these are free."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest

import numpy as np

from kvtier.engine.scheduling.request import Request
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.up.promotion import NO_SLOT, Hit

MAX_WITHOUT_KV = 1 << 20  # tokens of a request to a model whose states take the same memory for any length


class SlotDemand:
    """An estimate of the device slots that requests need, so that the scheduler admits only requests that fit.

    A step computes at most *chunk* tokens of each request.
    """

    def __init__(self, cache: TieredCache, chunk: int) -> None:
        self._cache = cache
        self._chunk = chunk

    def of(self, num_tokens: int) -> list[int]:
        """Return for each attention group the maximum number of slots that a request of *num_tokens* leases at once."""
        return max_blocks(self._cache.groups, num_tokens, self._chunk)

    def fits(self, request: Request, hit: Hit, active: Sequence[Request]) -> bool:
        """Return whether enough device slots are free for all known tokens of the request.

        Slots that the *active* requests hold, or will need for the rest of their prompts, are not available. If no
        request is active, the result is always True.
        """
        if not active:
            return True
        shared, free = self._cache.plans.num_leased(hit), self._cache.free_slots()
        spoken_for = [self._to_come(other) for other in active if not other.is_decoding]
        for group_id, blocks in enumerate(self._of_all(request)):
            if blocks - shared[group_id] > free[group_id] - sum(to_come[group_id] for to_come in spoken_for):
                return False
        return True

    def _of_all(self, request: Request) -> list[int]:
        return self.of(len(request.token_ids) + 1)  # including the next token to be generated

    def _to_come(self, request: Request) -> list[int]:
        """Return for each group how many slots the request still needs to compute its prompt.

        These are in addition to the slots that the request holds or that are reserved for it.
        """
        leased = [num_leased(table) for table in request.tables]
        if request.loading is not None:
            leased = [sum(pair) for pair in zip_longest(leased, request.loading.num_slots(), fillvalue=0)]
        return [max(0, limit - there) for limit, there in zip_longest(self._of_all(request), leased, fillvalue=0)]


def num_leased(table: Sequence[int]) -> int:
    """Return the number of slots in a block table, without its NO_SLOT entries."""
    return int(np.count_nonzero(np.array(table, np.int32) != NO_SLOT))


@lru_cache(maxsize=4096)
def max_blocks(groups: tuple[AttentionGroup, ...], num_tokens: int, chunk: int) -> list[int]:
    """Return for each group how many blocks a request of *num_tokens* holds at most while it is computed in chunks.

    A chunk may start at any token, because of a hit, a preemption or a small budget.
    """
    return [_max_of_group(group, num_tokens, chunk) for group in groups]


def _max_of_group(group: AttentionGroup, num_tokens: int, chunk: int) -> int:
    num_blocks = -(-num_tokens // group.block_size)
    if group.keeps_states:  # the state at the end of the last full block, and the one after it
        return min(num_blocks, 2)
    return _max_of_window(group, num_tokens, chunk) if group.forgets else num_blocks


def _max_of_window(group: AttentionGroup, num_tokens: int, chunk: int) -> int:
    """Return how many blocks a request holds at most in a group that forgets old blocks, wherever its chunks start."""
    # Of the starts that need the same first block, only the last is tried, because its chunk needs the most blocks.
    # After `block_size` tries, the numbers of blocks repeat. (Trying all starts took 47 ms for a prompt of a new
    # length; this takes 0.1 ms.)
    start, limit = max(0, num_tokens - chunk), 0
    for _ in range(group.block_size + 1):
        first = group.first_needed(start)
        limit = max(limit, -(-min(start + chunk, num_tokens) // group.block_size) - first)
        if not first:
            break
        start = bisect_left(range(start), first, key=group.first_needed) - 1
    return limit


def longest_request(
    groups: tuple[AttentionGroup, ...], num_slots: Sequence[int], chunk: int, model_limit: int | None
) -> int:
    """Return the length in tokens of the longest request that can run alone, computed in chunks of *chunk* tokens.

    *num_slots* is the number of device slots of each attention group. The result is at most *model_limit*, the model's
    context length. If *model_limit* is None, the result is at most the number of tokens that fit into the slots of the
    largest group, or `MAX_WITHOUT_KV` if the model keeps only recurrent states.
    """

    def fits(num_tokens: int) -> bool:
        pairs = zip(max_blocks(groups, num_tokens, chunk), num_slots, strict=True)
        return all(blocks <= slots for blocks, slots in pairs)

    pairs = zip(groups, num_slots, strict=True)
    sizes = [group.block_size * slots for group, slots in pairs if not group.keeps_states]
    limit = max(sizes, default=MAX_WITHOUT_KV) if model_limit is None else model_limit
    if fits(limit):
        return limit
    minimum = 0  # known to fit
    while limit - minimum > 1:
        middle = (minimum + limit) // 2
        minimum, limit = (middle, limit) if fits(middle) else (minimum, middle)
    return minimum
