"""Attention groups: where each kind can resume, alone and together, against a try of every length."""

import random
from collections.abc import Callable, Sequence

import pytest

from kvtier.tiers.groups import (
    AttentionGroup,
    ChunkedLocal,
    FullAttention,
    RecurrentState,
    SlidingWindow,
    longest_hit,
)


class Present:
    """Which blocks are present: one string of 1 and 0 for each group. Counts what it is asked."""

    def __init__(self, *groups: str) -> None:
        self.groups = groups
        self.num_questions = 0

    def __call__(self, group_id: int, block_id: int) -> bool:
        assert block_id >= 0, "asked for a block before the first"
        self.num_questions += 1
        return self.groups[group_id][block_id] == "1"


def longest(group: AttentionGroup, blocks: str, num_blocks: int | None = None) -> int:
    present = Present(blocks)
    return group.longest(len(blocks) if num_blocks is None else num_blocks, lambda block_id: present(0, block_id))


def longest_by_trying(num_blocks: int, groups: Sequence[AttentionGroup], present: Sequence[str]) -> int:
    for length in range(num_blocks, 0, -1):
        needed = [range(group.first_needed(length * group.block_size), length) for group in groups]
        if all("0" not in present[i][blocks.start : blocks.stop] for i, blocks in enumerate(needed)):
            return length
    return 0


# --- one group at a time; strings of blocks as in the reference's tests, block size 2


@pytest.mark.parametrize(
    ("blocks", "num_blocks", "expected"),
    [("1101", 4, 2), ("1111", 3, 3), ("1111", 4, 4), ("011", 3, 0), ("000", 3, 0), ("", 0, 0)],
)
def test_full_attention_resumes_before_the_first_hole(blocks: str, num_blocks: int, expected: int) -> None:  # S35
    assert longest(FullAttention(2), blocks, num_blocks) == expected


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ("0000000000", 0),
        ("1", 1),
        ("10", 1),
        ("11", 2),
        ("110", 2),
        ("111", 3),
        ("1110", 3),
        ("110100110111", 12),
        ("11010011000", 8),
        ("110100110001", 8),
        ("", 0),
    ],
)
def test_a_window_of_four_tokens_resumes_after_two_blocks_in_a_row(blocks: str, expected: int) -> None:  # S32
    assert longest(SlidingWindow(2, window_tokens=4), blocks) == expected


@pytest.mark.parametrize(
    ("window_tokens", "num_needed"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (33, 16), (1000, 20)]
)
def test_a_window_needs_the_blocks_of_its_tokens_but_the_next_one(window_tokens: int, num_needed: int) -> None:
    group = SlidingWindow(2, window_tokens)

    assert 20 - group.first_needed(40) == num_needed
    assert longest(group, "0" * (20 - num_needed) + "1" * num_needed) == 20


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ("1", 1),
        ("10", 2),
        ("110", 2),
        ("111", 3),
        ("0000", 4),
        ("000000001", 9),
        ("000000000", 8),
        ("0000000011", 10),
        ("0000000000", 10),
    ],
)
def test_whole_chunks_behind_count_even_when_nothing_of_them_is_left(blocks: str, expected: int) -> None:  # S34
    assert longest(ChunkedLocal(2, chunk_tokens=4), blocks) == expected


@pytest.mark.parametrize(("blocks", "expected"), [("1010", 3), ("0001", 4), ("000", 0), ("1", 1), ("", 0)])
def test_a_recurrent_state_resumes_after_its_newest_block(blocks: str, expected: int) -> None:  # S36
    assert longest(RecurrentState(2), blocks) == expected


# --- what is passed and never read again


@pytest.mark.parametrize(("num_tokens", "num_passed"), [(0, 0), (4, 0), (5, 1), (6, 1), (7, 2), (11, 4)])
def test_a_window_passes_blocks_as_it_moves_on(num_tokens: int, num_passed: int) -> None:  # S37
    assert SlidingWindow(2, window_tokens=4).first_needed(num_tokens) == num_passed


@pytest.mark.parametrize(("num_tokens", "num_passed"), [(0, 0), (3, 0), (4, 2), (6, 2), (7, 2), (8, 4), (12, 6)])
def test_a_chunk_passes_its_blocks_all_at_once(num_tokens: int, num_passed: int) -> None:  # S38
    assert ChunkedLocal(2, chunk_tokens=4).first_needed(num_tokens) == num_passed


@pytest.mark.parametrize(
    ("group_of", "reads"),
    [
        (FullAttention, lambda token, before: True),
        *(
            (lambda size, w=w: SlidingWindow(size, w), lambda token, before, w=w: token - before < w)
            for w in (1, 5, 32)
        ),
        *(
            (lambda size, c=c: ChunkedLocal(size, c), lambda token, before, c=c: token // c == before // c)
            for c in (3, 16, 64)
        ),
        (RecurrentState, lambda token, before: token - before <= 1),
    ],
    ids=["full", "window1", "window5", "window32", "chunk3", "chunk16", "chunk64", "recurrent"],
)
@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_the_first_needed_block_has_the_oldest_token_that_is_read(
    block_size: int, group_of: Callable[[int], AttentionGroup], reads: Callable[[int, int], bool]
) -> None:
    group = group_of(block_size)
    for token in range(200):
        oldest = next(before for before in range(token + 1) if reads(token, before))

        assert group.first_needed(token) == oldest // block_size, f"after {token} tokens"


def random_group(pick: random.Random, block_size: int) -> AttentionGroup:
    return pick.choice(
        [
            lambda: FullAttention(block_size),
            lambda: SlidingWindow(block_size, pick.randint(1, 8 * block_size)),
            lambda: ChunkedLocal(block_size, pick.randint(1, 8 * block_size)),
            lambda: RecurrentState(block_size),
        ]
    )()


@pytest.mark.parametrize("seed", range(10))
def test_what_a_group_needs_never_moves_back(seed: int) -> None:
    print(f"seed {seed}")
    pick = random.Random(seed)
    for _ in range(50):
        group = random_group(pick, pick.choice([1, 2, 16]))

        first_needed = [group.first_needed(num_tokens) for num_tokens in range(300)]

        assert first_needed == sorted(first_needed), group


# --- several groups


@pytest.mark.parametrize("seed", range(10))
def test_the_longest_hit_is_what_trying_every_length_finds(seed: int) -> None:
    print(f"seed {seed}")
    pick = random.Random(seed)
    num_cut_short = 0
    for _ in range(2500):
        block_size = pick.choice([1, 2, 16])
        num_blocks = pick.randint(0, 14)
        groups = [random_group(pick, block_size) for _ in range(pick.randint(1, 4))]
        share = pick.choice([0.5, 0.8, 0.95])  # enough present that the answers spread over all lengths
        present = ["".join("01"[pick.random() < share] for _ in range(num_blocks)) for _ in groups]
        expected = longest_by_trying(num_blocks, groups, present)
        num_cut_short += 0 < expected < num_blocks

        assert longest_hit(num_blocks, groups, Present(*present)) == expected, (groups, present)
    assert num_cut_short > 250, "too few interesting cases"


def test_groups_that_disagree_step_down_until_they_agree() -> None:
    groups = [FullAttention(2), RecurrentState(2), RecurrentState(2)]
    present = Present("11111111", "10101011", "11010100")

    assert longest_hit(8, groups, present) == 1


def test_blocks_beyond_the_ones_asked_for_do_not_count() -> None:
    assert longest_hit(3, [FullAttention(2), SlidingWindow(2, 4)], Present("11111", "01111")) == 3


@pytest.mark.parametrize("num_blocks", [1, 8192])
def test_a_prompt_never_seen_costs_full_attention_one_question(num_blocks: int) -> None:
    present = Present("0" * num_blocks, "0" * num_blocks, "0" * num_blocks)
    groups = [FullAttention(16), SlidingWindow(16, 1024), RecurrentState(16)]

    assert longest_hit(num_blocks, groups, present) == 0
    assert present.num_questions == 1


def test_a_prompt_fully_present_costs_each_group_its_needed_blocks() -> None:
    present = Present("1" * 100, "1" * 100, "1" * 100)
    groups = [FullAttention(16), SlidingWindow(16, 64), RecurrentState(16)]

    assert longest_hit(100, groups, present) == 100
    assert present.num_questions == 100 + 4 + 1
