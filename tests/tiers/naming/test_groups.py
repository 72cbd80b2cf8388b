"""Attention groups: where each kind can resume, alone and together, against a try of every length."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import pytest

from kvtier.tiers.naming.groups import (
    AttentionGroup,
    ChunkedLocal,
    FullAttention,
    RecurrentState,
    SlidingWindow,
    alignment,
    longest_hit,
    longest_single,
    name_block_size,
)


class Present:
    """Which blocks are present: one string of 1 and 0 for each group. Counts the questions."""

    def __init__(self, *groups: str) -> None:
        self.groups = groups
        self.num_questions = 0

    def __call__(self, group_id: int, start: int, end: int) -> int:
        assert 0 <= start <= end, "asked for blocks that cannot be"
        self.num_questions += 1
        hole = self.groups[group_id].find("0", start, end)
        return end if hole < 0 else hole


def longest(group: AttentionGroup, blocks: str, num_blocks: int | None = None) -> int:
    return group.longest(len(blocks) if num_blocks is None else num_blocks, partial(Present(blocks), 0))


def can_resume(group: AttentionGroup, blocks: str, num_tokens: int) -> bool:
    return "0" not in blocks[group.first_needed(num_tokens) : num_tokens // group.block_size]


def longest_by_trying(num_tokens: int, unit: int, groups: Sequence[AttentionGroup], present: Sequence[str]) -> int:
    for end in range(num_tokens // unit * unit, 0, -unit):
        if all(can_resume(group, blocks, end) for group, blocks in zip(groups, present, strict=True)):
            return end
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


def test_a_request_goes_on_inside_a_block_unless_the_block_is_a_state() -> None:
    kinds = [FullAttention(4), SlidingWindow(4, 8), ChunkedLocal(4, 8), RecurrentState(4)]

    assert [group.resumes_inside for group in kinds] == [True, True, True, False]


# --- what is passed and never read again


@pytest.mark.parametrize(("num_tokens", "num_passed"), [(0, 0), (4, 0), (5, 1), (6, 1), (7, 2), (11, 4)])
def test_a_window_passes_blocks_as_it_moves_on(num_tokens: int, num_passed: int) -> None:  # S37
    assert SlidingWindow(2, window_tokens=4).first_needed(num_tokens) == num_passed


@pytest.mark.parametrize(("num_tokens", "num_passed"), [(0, 0), (3, 0), (4, 2), (6, 2), (7, 2), (8, 4), (12, 6)])
def test_a_chunk_passes_its_blocks_all_at_once(num_tokens: int, num_passed: int) -> None:  # S38
    assert ChunkedLocal(2, chunk_tokens=4).first_needed(num_tokens) == num_passed


def test_of_ten_blocks_found_below_a_window_of_two_blocks_takes_two() -> None:  # S41
    assert SlidingWindow(16, window_tokens=32).first_needed(160) == 8


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


def random_group(pick: random.Random, block_size: int, max_tokens: int) -> AttentionGroup:
    return pick.choice(
        [
            lambda: FullAttention(block_size),
            lambda: SlidingWindow(block_size, pick.randint(1, max_tokens)),
            lambda: ChunkedLocal(block_size, pick.randint(1, max_tokens)),
            lambda: RecurrentState(block_size),
        ]
    )()


@pytest.mark.parametrize("seed", range(10))
def test_what_a_group_needs_never_moves_back(seed: int) -> None:
    print(f"seed {seed}")
    pick = random.Random(seed)
    for _ in range(50):
        block_size = pick.choice([1, 2, 16])
        group = random_group(pick, block_size, 8 * block_size)

        first_needed = [group.first_needed(num_tokens) for num_tokens in range(300)]

        assert first_needed == sorted(first_needed), group


# --- several groups


def random_groups(pick: random.Random) -> list[AttentionGroup]:
    sizes = [1, 2, 4, 8, 16, 32, 48]
    block_sizes = [pick.choice(sizes)] * pick.randint(1, 4) if pick.random() < 0.3 else pick.choices(sizes, k=3)
    return [random_group(pick, block_size, 4 * max(block_sizes)) for block_size in block_sizes]


def random_blocks(pick: random.Random, num_blocks: int) -> str:
    """Random blocks: mostly a few holes, sometimes one long hole or noise."""
    if not num_blocks:
        return ""
    if pick.random() < 0.7:
        blocks = bytearray(b"1") * num_blocks
        for _ in range(pick.randint(0, 4)):
            blocks[pick.randrange(num_blocks)] = ord("0")
        return blocks.decode()
    if pick.random() < 0.5:
        start, end = sorted(pick.choices(range(num_blocks + 1), k=2))
        return "1" * start + "0" * (end - start) + "1" * (num_blocks - end)
    return format(pick.getrandbits(num_blocks) | pick.getrandbits(num_blocks), f"0{num_blocks}b")


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 10))])
def test_the_longest_hit_is_what_trying_every_length_finds(seed: int) -> None:
    print(f"seed {seed}")
    pick = random.Random(seed)
    num_cut_short = 0
    for _ in range(2000):
        groups = random_groups(pick)
        unit = alignment(groups)
        for _ in range(8):
            num_tokens = pick.randint(0, 10 * unit)
            present = [random_blocks(pick, num_tokens // group.block_size) for group in groups]
            expected = longest_by_trying(num_tokens, unit, groups, present)
            num_cut_short += 0 < expected < num_tokens // unit * unit

            assert longest_hit(num_tokens, groups, Present(*present)) == expected, (num_tokens, groups, present)
    assert num_cut_short > 4000, "too few interesting cases"


@pytest.mark.parametrize("seed", range(10))
def test_a_junction_is_where_groups_that_never_forget_agree_or_the_best_of_the_others(seed: int) -> None:
    print(f"seed {seed}")
    pick = random.Random(seed)
    num_junctions = 0
    for _ in range(1000):
        groups = random_groups(pick)
        unit = alignment(groups)
        num_tokens = pick.randint(0, 10 * unit)
        present = [random_blocks(pick, num_tokens // group.block_size) for group in groups]
        alone = [
            longest_by_trying(num_tokens, unit, [group], [blocks])
            for group, blocks in zip(groups, present, strict=True)
        ]
        lasting = [end for end, group in zip(alone, groups, strict=True) if not group.forgets]

        single = longest_single(num_tokens, groups, Present(*present))

        assert single == (min(lasting) if lasting else max(alone)), (num_tokens, groups, present)
        num_junctions += single > longest_hit(num_tokens, groups, Present(*present))
    assert num_junctions > 100, "too few interesting cases"


def test_groups_that_disagree_step_down_until_they_agree() -> None:
    groups = [FullAttention(2), RecurrentState(2), RecurrentState(2)]
    present = Present("11111111", "10101011", "11010100")

    assert longest_hit(16, groups, present) == 2


def test_blocks_beyond_the_ones_asked_for_do_not_count() -> None:
    assert longest_hit(6, [FullAttention(2), SlidingWindow(2, 4)], Present("11111", "01111")) == 6


@pytest.mark.parametrize(
    ("present", "expected", "junction"),
    [
        (("111", "111", "111"), 48, 48),
        (("111", "011", "011"), 48, 48),  # the window has passed block 0
        (("011", "111", "111"), 0, 0),
        (("110", "110", "110"), 32, 32),
        (("110", "111", "111"), 32, 32),
        (("111", "111", "110"), 32, 48),
        (("110", "011", "011"), 0, 32),
    ],
)
def test_full_attention_and_two_windows_resume_where_all_can(
    present: tuple[str, ...], expected: int, junction: int
) -> None:  # S42: the prompt has 53 tokens, the last of which is always computed
    groups = [FullAttention(16), SlidingWindow(16, 32), SlidingWindow(16, 32)]

    assert longest_hit(52, groups, Present(*present)) == expected
    assert longest_single(52, groups, Present(*present)) == junction


# --- groups whose blocks differ in size


def test_hits_end_where_blocks_of_all_groups_end_and_names_where_any_does() -> None:
    groups = [FullAttention(32), SlidingWindow(48, 100), RecurrentState(16)]

    assert alignment(groups) == 96
    assert name_block_size(groups[:2]) == name_block_size(groups) == 16
    assert longest_hit(300, groups, Present("1" * 9, "1" * 6, "1" * 18)) == 288


def test_a_group_of_large_blocks_holds_the_others_to_its_ends() -> None:  # S44
    groups = [FullAttention(32), SlidingWindow(16, 32)]

    assert longest_hit(99, groups, Present("110", "111111")) == 64
    assert longest_hit(99, groups, Present("111", "111110")) == 64  # not 80, where no block of 32 ends
    assert longest_hit(99, groups, Present("111", "110111")) == 96


# --- what a search costs


@pytest.mark.parametrize("num_blocks", [1, 8192])
def test_a_prompt_never_seen_costs_full_attention_one_question(num_blocks: int) -> None:
    present = Present("0" * num_blocks, "0" * num_blocks, "0" * num_blocks)
    groups = [FullAttention(16), SlidingWindow(16, 1024), RecurrentState(16)]

    assert longest_hit(num_blocks * 16, groups, present) == 0
    assert present.num_questions == 1


def test_a_prompt_fully_present_costs_a_question_for_each_group() -> None:
    present = Present("1" * 100, "1" * 100, "1" * 100)
    groups = [FullAttention(16), SlidingWindow(16, 64), RecurrentState(16)]

    assert longest_hit(1600, groups, present) == 1600
    assert present.num_questions == 3


def test_a_long_prompt_of_which_little_is_left_costs_a_window_a_question_per_window() -> None:
    present = Present("111" + "0" * 8189)

    assert longest_hit(8192 * 16, [SlidingWindow(16, 1024)], present) == 48
    assert present.num_questions <= 8192 / 64 + 1


@pytest.mark.parametrize("num_needed", [1, 2, 3, 4, 8])
def test_no_pattern_of_holes_costs_a_window_more_than_two_questions_per_window_and_hole(num_needed: int) -> None:
    group = SlidingWindow(1, window_tokens=num_needed + 1)
    costs = []
    for blocks in product("01", repeat=12):
        present = Present("".join(blocks))
        group.longest(12, partial(present, 0))
        costs.append(present.num_questions)

    assert max(costs) <= 2 * 12 / (num_needed + 1) + 2


def test_the_worst_pattern_for_a_window_of_64_blocks_costs_a_prompt_of_8192_blocks_253_questions() -> None:
    present = Present("00" + ("0" + "1" * 63 + "0") * 126)

    assert longest_hit(8192 * 16, [SlidingWindow(16, 1024)], present) == 0
    assert present.num_questions == 253
