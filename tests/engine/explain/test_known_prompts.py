"""KnownPrompts: the nearest prompt, and the first token that differs, against comparing all prompts token by token."""

import random

import pytest

from kvtier.engine.explain.known_prompts import KnownPrompts, Nearest
from kvtier.engine.explain.prompt_print import PromptPrint, print_of
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys

SIZE = 4
KEY = bytes(range(16))


def printed(token_ids: list[int], salt: str | None = None) -> PromptPrint:
    chain = BlockChain(SIZE, ExtraKeys(cache_salt=salt))
    chain.extend(token_ids)
    return print_of(chain, len(token_ids), "here", KEY)


def num_equal(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("seed", range(20))
def test_the_nearest_is_the_one_that_comparing_tokens_finds(seed: int) -> None:
    rng = random.Random(seed)
    known, prompts = KnownPrompts(SIZE), []
    for _ in range(30):
        begin = rng.choice(prompts)[: rng.randrange(30)] if prompts and rng.random() < 0.8 else []
        prompt = [*begin, *(rng.randrange(50_000) for _ in range(rng.randrange(1, 20)))]

        found = known.nearest(printed(prompt), 0, known.num_added)

        shared = max((num_equal(prompt, other) for other in prompts), default=0)
        if shared == 0:
            assert found is None
        else:
            nearest = [other for other in prompts if num_equal(prompt, other) == shared]
            departs = shared < len(prompt) and any(len(other) > shared for other in nearest)
            assert found == Nearest(shared, departs)
        known.add(printed(prompt), 0)
        prompts.append(prompt)


def test_what_came_later_is_not_looked_at() -> None:
    known = KnownPrompts(SIZE)
    before = known.num_added
    known.add(printed([1, 2, 3, 4, 5, 6]), 0)

    assert known.nearest(printed([1, 2, 3, 9]), 0, before) is None
    assert known.nearest(printed([1, 2, 3, 9]), 0, known.num_added) == Nearest(3, True)


def test_another_salt_shares_nothing() -> None:
    known = KnownPrompts(SIZE)
    known.add(printed(list(range(20)), "ann"), 0)

    assert known.nearest(printed(list(range(20)), "bob"), 0, known.num_added) is None
    assert known.nearest(printed(list(range(20)), "ann"), 0, known.num_added) == Nearest(20, False)


def test_the_oldest_blocks_make_way() -> None:
    known = KnownPrompts(SIZE, num_tokens=10 * SIZE)
    first = list(range(4 * SIZE))
    known.add(printed(first), 0)
    for number in range(3):
        known.add(printed([1000 + number, *range(4 * SIZE - 1)]), 0)

    assert known.nearest(printed(first), 0, known.num_added) is None
    assert known.nearest(printed([1002, *range(5)]), 0, known.num_added) == Nearest(6, False)


def test_no_token_can_be_read_from_a_print() -> None:
    token_ids = [7] * 3 * SIZE
    own, other = printed(token_ids), print_of_with_other_key(token_ids)

    assert own.marks.tobytes() != other.marks.tobytes()
    assert own.contents != other.contents
    assert set(own.contents) == {1, 2, 3}


def print_of_with_other_key(token_ids: list[int]) -> PromptPrint:
    chain = BlockChain(SIZE)
    chain.extend(token_ids)
    return print_of(chain, len(token_ids), "here", bytes(16))
