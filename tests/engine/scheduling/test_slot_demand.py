"""SlotDemand: the number of slots that a request needs, found without walking through its prompt."""

import random

import pytest

from kvtier.engine.scheduling.slot_demand import most_blocks
from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, FullAttention, RecurrentState, SlidingWindow


def test_the_most_blocks_are_those_of_the_worst_start() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    for _ in range(500):
        size, num_tokens, chunk = rng.choice([1, 3, 4, 12, 16]), rng.randint(1, 500), rng.randint(1, 120)
        group = rng.choice(
            [SlidingWindow(size, rng.randint(1, 80)), ChunkedLocal(size, rng.randint(1, 90)), RecurrentState(size)]
        )
        held = [-(-min(start + chunk, num_tokens) // size) - group.first_needed(start) for start in range(num_tokens)]
        assert most_blocks((group,), num_tokens, chunk) == [max(held)], (group, num_tokens, chunk)


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

    most_blocks((group, FullAttention(16)), 131_072 + 7, 512)

    assert num_asked < 1000  # of 65,536
