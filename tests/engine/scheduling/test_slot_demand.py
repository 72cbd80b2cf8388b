"""SlotDemand: the number of slots that a request needs, found without walking through its prompt."""

import random
from types import SimpleNamespace
from typing import cast

import pytest

from kvtier.engine.scheduling.request import Request
from kvtier.engine.scheduling.slot_demand import SlotDemand, longest_request, max_blocks
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, FullAttention, RecurrentState, SlidingWindow
from kvtier.tiers.up.promotion import Hit


def request(num_tokens: int, num_leased: int, *, is_decoding: bool = False) -> Request:
    """As much of a request as is looked at."""
    made = SimpleNamespace(
        token_ids=range(num_tokens), tables=[[7] * num_leased], loading=None, is_decoding=is_decoding
    )
    return cast(Request, made)


def test_a_request_fits_beside_what_others_will_need_for_their_prompts() -> None:
    cache = SimpleNamespace(
        groups=(FullAttention(16),), plans=SimpleNamespace(num_leased=lambda hit: [2]), free_slots=lambda: [9]
    )
    demand, hit = SlotDemand(cast(TieredCache, cache), 64), cast(Hit, None)
    new = request(16 * 8 - 1, 0)  # eight slots, two of which have its prefix and are leased

    assert demand.fits(new, hit, [request(16 * 5 - 1, 2)])  # three more
    assert not demand.fits(new, hit, [request(16 * 6 - 1, 2)])  # four
    assert demand.fits(new, hit, [request(16 * 6 - 1, 2, is_decoding=True)])
    assert demand.fits(request(16 * 99, 0), hit, [])


def test_the_most_blocks_are_those_of_the_worst_start() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    for _ in range(500):
        size, num_tokens, chunk = rng.choice([1, 3, 4, 12, 16]), rng.randint(1, 500), rng.randint(1, 120)
        group = rng.choice([SlidingWindow(size, rng.randint(1, 80)), ChunkedLocal(size, rng.randint(1, 90))])
        held = [-(-min(start + chunk, num_tokens) // size) - group.first_needed(start) for start in range(num_tokens)]
        assert max_blocks((group,), num_tokens, chunk) == [max(held)], (group, num_tokens, chunk)


def test_of_recurrent_states_a_request_holds_two() -> None:
    assert [max_blocks((RecurrentState(16),), num_tokens, 512)[0] for num_tokens in (1, 16, 17, 100_000)] == [
        1,
        1,
        2,
        2,
    ]
    assert longest_request((FullAttention(16), RecurrentState(16)), (100, 2), 512, None) == 1600
    assert longest_request((FullAttention(16), RecurrentState(16)), (100, 1), 512, None) == 16


@pytest.mark.parametrize("group", [SlidingWindow(16, 1024), ChunkedLocal(16, 8192), RecurrentState(16)])
def test_a_long_prompt_asks_as_few_questions_as_a_short_one(
    group: AttentionGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked = 0
    first_needed = type(group).first_needed

    def counted(group: AttentionGroup, num_tokens: int) -> int:
        nonlocal num_asked
        num_asked += 1
        return first_needed(group, num_tokens)

    monkeypatch.setattr(type(group), "first_needed", counted)

    max_blocks((group, FullAttention(16)), 131_072 + 7, 512)

    assert num_asked < 1000  # of 65,536
