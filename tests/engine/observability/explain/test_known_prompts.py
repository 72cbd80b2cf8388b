"""KnownPrompts: the nearest prompt, and the first token that differs, against comparing all prompts token by token."""

import random

import pytest

from kvtier.engine.observability.explain.known_prompts import MAX_PROMPTS, KnownPrompts, Nearest
from kvtier.engine.observability.explain.prompt_print import PromptFingerprint, PromptPrinter
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys, Lora, MultimodalItem

SIZE = 4
KEY = bytes(range(16))


def printed(token_ids: list[int], salt: str | None = None) -> PromptFingerprint:
    return printed_with(ExtraKeys(cache_salt=salt), token_ids)


def printed_with(extra: ExtraKeys, token_ids: list[int], size: int = SIZE) -> PromptFingerprint:
    chain = BlockChain(size, extra)
    chain.extend(token_ids)
    return PromptPrinter(size, KEY).fingerprint_of(chain, chain.names, len(token_ids), "here")


def num_equal(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("seed", range(20))
def test_the_nearest_is_the_one_that_comparing_tokens_finds(seed: int) -> None:
    rng = random.Random(seed)
    known, prompts = KnownPrompts(), []
    for _ in range(30):
        begin = rng.choice(prompts)[: rng.randrange(30)] if prompts and rng.random() < 0.8 else []
        prompt = [*begin, *(rng.randrange(50_000) for _ in range(rng.randrange(1, 20)))]

        found = known.older(known.num_added).nearest(printed(prompt), 0)

        shared = max((num_equal(prompt, other) for other in prompts), default=0)
        if shared == 0:
            assert found is None
        else:
            nearest = [other for other in prompts if num_equal(prompt, other) == shared]
            departs = shared < len(prompt) and any(len(other) > shared for other in nearest)
            assert found == Nearest(shared, departs)
        known.add(printed(prompt), 0.0)
        prompts.append(prompt)


def test_what_came_later_is_not_looked_at() -> None:
    known = KnownPrompts()
    before = known.num_added
    known.add(printed([1, 2, 3, 4, 5, 6]), 0.0)

    assert known.older(before).nearest(printed([1, 2, 3, 9]), 0) is None
    assert known.older(known.num_added).nearest(printed([1, 2, 3, 9]), 0) == Nearest(3, True)


def test_another_salt_shares_nothing() -> None:
    known = KnownPrompts()
    known.add(printed(list(range(20)), "ann"), 0.0)

    assert known.older(known.num_added).nearest(printed(list(range(20)), "bob"), 0) is None
    assert known.older(known.num_added).nearest(printed(list(range(20)), "ann"), 0) == Nearest(20, False)


@pytest.mark.parametrize("size", [4, 16, 24])
def test_one_token_that_differs_in_a_long_prompt_is_found(size: int) -> None:
    rng = random.Random(size)
    known = KnownPrompts()
    prompt = [rng.randrange(128_000) for _ in range(3_001)]
    known.add(printed_with(ExtraKeys(), prompt, size), 0.0)

    for place in [0, 511, 512, 2_900, 2_999, 3_000, *(rng.randrange(3_000) for _ in range(40))]:
        other = [*prompt[:place], prompt[place] + 1, *prompt[place + 1 :]]
        found = known.older(known.num_added).nearest(printed_with(ExtraKeys(), other, size), 0)
        assert found == (Nearest(place, True) if place else None)


def test_an_adapter_is_a_part_of_what_each_block_continues() -> None:
    known = KnownPrompts()
    legal, other = (ExtraKeys(lora=Lora(name, "a digest")) for name in ("legal", "other"))
    known.add(printed_with(legal, list(range(20))), 0.0)

    assert known.older(known.num_added).nearest(printed_with(legal, [*range(14), 99, *range(9)]), 0) == Nearest(
        14, True
    )
    assert known.older(known.num_added).nearest(printed_with(other, list(range(20))), 0) is None
    assert known.older(known.num_added).nearest(printed(list(range(20))), 0) is None


def test_an_image_is_a_part_of_the_blocks_that_it_is_in() -> None:
    known = KnownPrompts()
    cat, dog = (ExtraKeys(multimodal=(MultimodalItem(name, 2 * SIZE, SIZE),)) for name in ("cat", "dog"))
    known.add(printed_with(cat, [7] * 4 * SIZE), 0.0)

    assert known.older(known.num_added).nearest(printed_with(cat, [7] * 4 * SIZE), 0) == Nearest(4 * SIZE, False)
    assert known.older(known.num_added).nearest(printed_with(dog, [7] * 4 * SIZE), 0) == Nearest(2 * SIZE, False)


def test_so_many_prompts_are_known_and_no_more() -> None:
    known = KnownPrompts()
    for number in range(MAX_PROMPTS + 1):
        known.add(printed([number, 1, 2, 3, 4]), 0.0)

    assert known.older(known.num_added).nearest(printed([0, 1]), 0) is None
    assert known.older(known.num_added).nearest(printed([1, 1]), 0) == Nearest(2, False)


def test_the_oldest_prompts_make_way() -> None:
    known = KnownPrompts(max_tokens=10 * SIZE)
    first = list(range(4 * SIZE))
    known.add(printed(first), 0.0)
    for number in range(3):
        known.add(printed([1000 + number, *range(4 * SIZE - 1)]), 0.0)

    assert known.older(known.num_added).nearest(printed(first), 0) is None
    assert known.older(known.num_added).nearest(printed([1002, *range(5)]), 0) == Nearest(6, False)


def test_no_token_can_be_read_from_a_print() -> None:
    token_ids = [7] * 3 * SIZE
    own, other = printed(token_ids), print_of_with_other_key(token_ids)

    assert own.marks.tobytes() != other.marks.tobytes()
    assert own.contents != other.contents
    assert set(own.contents) == {1, 2, 3}


def print_of_with_other_key(token_ids: list[int]) -> PromptFingerprint:
    chain = BlockChain(SIZE)
    chain.extend(token_ids)
    return PromptPrinter(SIZE, bytes(16)).fingerprint_of(chain, chain.names, len(token_ids), "here")


def test_the_number_of_prompts_at_an_earlier_time_counts_those_added_until_then() -> None:
    known = KnownPrompts()
    for number in range(MAX_PROMPTS + 5):
        known.add(printed([number]), float(number))

    assert known.num_before(float(MAX_PROMPTS)) == MAX_PROMPTS + 1
    assert known.num_before(1e9) == known.num_added
    assert len(known.older(known.num_before(float(MAX_PROMPTS))).prints) == MAX_PROMPTS - 4
