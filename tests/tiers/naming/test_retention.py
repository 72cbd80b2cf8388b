"""Retention: which blocks get a name, and from where a later prompt can go on because of it."""

import random
from collections.abc import Sequence
from itertools import pairwise

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
)
from kvtier.tiers.naming.retention import Retention

C = [0] * 16 + [1] * 16 + [2] * 16  # three blocks, as in the reference's tests

FULL_AND_TWO_WINDOWS = [FullAttention(16), SlidingWindow(16, 32), SlidingWindow(16, 32)]
FULL_32_AND_WINDOW_16 = [FullAttention(32), SlidingWindow(16, 32)]
FULL_AND_STATE = [FullAttention(16), RecurrentState(16)]


class Named:
    """The blocks of all groups that retention has named, each by its group and the prefix that it ends."""

    def __init__(self, groups: Sequence[AttentionGroup], interval_tokens: int | None) -> None:
        self.groups = groups
        self.retention = Retention(groups, interval_tokens)
        self.blocks: set[tuple[int, tuple[int, ...]]] = set()

    def run(self, prompt: list[int], stops: Sequence[int] = (), junctions: Sequence[int] = ()) -> None:
        """Compute *prompt* in chunks that end at *stops* and at its end; there alone a recurrent state exists."""
        boundaries = (len(prompt) - 1, *junctions)
        start = 0
        for end in (*stops, len(prompt)):
            for group_id, group in enumerate(self.groups):
                first, last = start // group.block_size, end // group.block_size
                if isinstance(group, RecurrentState):
                    first = max(first, last - 1) if end % group.block_size == 0 else last
                for blocks in self.retention.kept(group, first, last, boundaries):
                    self.blocks.update((group_id, self.prefix(prompt, group_id, block_id)) for block_id in blocks)
            start = end

    def prefix(self, prompt: list[int], group_id: int, block_id: int) -> tuple[int, ...]:
        return tuple(prompt[: (block_id + 1) * self.groups[group_id].block_size])

    def lose(self, prompt: list[int], *lost: tuple[int, int]) -> None:
        """Evict blocks of *prompt*, each given as group and block."""
        for group_id, block_id in lost:
            self.blocks.remove((group_id, self.prefix(prompt, group_id, block_id)))

    def ends(self, group_id: int) -> list[int]:
        return sorted(len(prefix) for of, prefix in self.blocks if of == group_id)

    def lookup(self, prompt: list[int]) -> tuple[int, int]:
        """The hit, and where the junction is: 0 where there is none."""

        def first_hole(group_id: int, start: int, end: int) -> int:
            prefixes = ((i, self.prefix(prompt, group_id, i)) for i in range(start, end))
            return next((i for i, prefix in prefixes if (group_id, prefix) not in self.blocks), end)

        hit = longest_hit(len(prompt) - 1, self.groups, first_hole)
        single = longest_single(len(prompt) - 1, self.groups, first_hole)
        return hit, single if single > hit else 0


# --- full attention and two windows of 32 tokens, block size 16


def test_without_an_interval_a_window_names_every_full_block() -> None:  # S42
    named = Named(FULL_AND_TWO_WINDOWS, None)

    named.run(C + [3] * 7)

    assert [named.ends(group_id) for group_id in range(3)] == [[16, 32, 48]] * 3
    assert named.lookup(C + [3] * 5) == (48, 0)


def test_with_interval_0_a_window_names_only_the_last_two_full_blocks_of_the_prompt() -> None:  # S43
    named = Named(FULL_AND_TWO_WINDOWS, 0)

    named.run(C + [3] * 7)

    assert [named.ends(group_id) for group_id in range(3)] == [[16, 32, 48], [32, 48], [32, 48]]
    assert named.lookup(C + [3] * 5) == (48, 0)


LAST_OF_FULL = [(0, 2)]
LAST_OF_A_WINDOW = [(2, 2)]
LAST_OF_ALL = [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ([(1, 0), (2, 0)], (48, 0)),
        ([(0, 0)], (0, 0)),
        (LAST_OF_ALL, (32, 0)),
        (LAST_OF_FULL, (32, 0)),
        (LAST_OF_A_WINDOW, (32, 48)),
        ([*LAST_OF_FULL, (1, 0), (2, 0)], (0, 32)),
    ],
)
def test_a_dense_cache_that_lost_blocks_resumes_earlier(
    lost: list[tuple[int, int]], expected: tuple[int, int]
) -> None:  # S42
    named = Named(FULL_AND_TWO_WINDOWS, None)
    named.run(C + [3] * 7)

    named.lose(C, *lost)

    assert named.lookup(C + [3] * 5) == expected


@pytest.mark.parametrize(("lost", "junction"), [(LAST_OF_FULL, 32), (LAST_OF_A_WINDOW, 48)])
def test_a_sparse_cache_that_lost_a_block_has_no_earlier_tail_to_resume_at(
    lost: list[tuple[int, int]], junction: int
) -> None:  # S43
    named = Named(FULL_AND_TWO_WINDOWS, 0)
    named.run(C + [3] * 7)

    named.lose(C, *lost)

    assert named.lookup(C + [3] * 5) == (0, junction)


# --- full attention in blocks of 32, a window of 32 tokens in blocks of 16


def test_a_prompt_that_shares_80_tokens_resumes_at_64_where_blocks_of_both_sizes_end() -> None:  # S44
    named = Named(FULL_32_AND_WINDOW_16, None)
    prompt = list(range(100))

    named.run(prompt)

    assert named.ends(0) == [32, 64, 96]
    assert named.ends(1) == [16, 32, 48, 64, 80, 96]
    assert named.lookup(prompt[:80] + [7] * 20) == (64, 0)


def test_with_interval_0_only_the_same_prompt_resumes_and_a_sibling_shows_the_junction() -> None:  # S44
    named = Named(FULL_32_AND_WINDOW_16, 0)
    prompt = list(range(100))

    named.run(prompt)

    assert named.ends(1) == [80, 96]
    assert named.lookup(prompt[:80] + [7] * 20) == (0, 64)
    assert named.lookup(prompt) == (96, 0)


def test_the_junction_that_one_sibling_shows_is_where_the_next_one_resumes() -> None:
    named = Named(FULL_32_AND_WINDOW_16, 0)
    shared = list(range(80))
    named.run(shared + [7] * 20)
    hit, junction = named.lookup(shared + [8] * 20)

    named.run(shared + [8] * 20, junctions=[junction])

    assert (hit, junction) == (0, 64)
    assert named.ends(1) == [48, 64, 80, 96, 96]  # the junction's tail, then those of both ends
    assert named.lookup(shared + [9] * 20) == (64, 0)


# --- full attention and a recurrent state, block size 16


def test_a_dense_recurrent_state_is_named_where_the_chunk_ended() -> None:  # S45; found at once, the lookup of S46
    named = Named(FULL_AND_STATE, None)

    named.run(C)

    assert (named.ends(0), named.ends(1)) == ([16, 32, 48], [48])
    assert named.lookup(C + [9] * 7) == (48, 0)


def test_a_sibling_that_leaves_before_the_only_state_finds_a_junction() -> None:  # S45
    named = Named(FULL_AND_STATE, None)

    named.run(C)

    assert named.lookup(C[:47] + [8] + [9] * 7) == (0, 32)


def test_with_interval_0_the_state_worth_naming_is_before_the_last_token_which_one_chunk_skips() -> None:  # S45
    named = Named(FULL_AND_STATE, 0)

    named.run(C)

    assert (named.ends(0), named.ends(1)) == ([16, 32, 48], [])
    assert named.lookup(C + [9] * 7) == (0, 48)


@pytest.mark.parametrize("interval_tokens", [None, 0])
def test_a_prompt_cut_where_its_last_full_block_ends_leaves_a_state_in_either_mode(
    interval_tokens: int | None,
) -> None:  # S45
    named = Named(FULL_AND_STATE, interval_tokens)

    named.run(C + [3] * 7, stops=[48])

    assert named.ends(1) == [48]
    assert named.lookup(C + [9] * 7) == (48, 0)


# --- which blocks, exactly


def random_groups(pick: random.Random) -> list[AttentionGroup]:
    def group() -> AttentionGroup:
        size = pick.choice([1, 2, 4, 6, 8])
        return pick.choice(
            [
                lambda: FullAttention(size),
                lambda: SlidingWindow(size, pick.randint(1, 60)),
                lambda: ChunkedLocal(size, pick.randint(1, 60)),
                lambda: RecurrentState(size),
            ]
        )()

    return [
        SlidingWindow(pick.choice([1, 2, 4, 8]), pick.randint(1, 60)),
        *(group() for _ in range(pick.randint(0, 2))),
    ]


def kept_blocks(retention: Retention, group: AttentionGroup, start: int, end: int, at: Sequence[int]) -> list[int]:
    return [block_id for blocks in retention.kept(group, start, end, at) for block_id in blocks]


@pytest.mark.parametrize("seed", range(10))
def test_what_is_kept_is_what_resuming_at_each_of_the_places_needs(seed: int) -> None:
    print(f"seed {seed}")
    pick = random.Random(seed)
    for _ in range(200):
        groups = random_groups(pick)
        unit = alignment(groups)
        interval_tokens = pick.randint(0, 5) * unit
        boundaries = [pick.randint(0, 12 * unit) for _ in range(pick.randint(0, 3))]
        ends = [boundary // unit * unit for boundary in boundaries]
        ends += range(interval_tokens, 12 * unit + 200, interval_tokens) if interval_tokens else []
        for group in groups:
            num_blocks = 12 * unit // group.block_size
            start, end = sorted(pick.choices(range(num_blocks + 1), k=2))
            needed = {i for e in ends for i in range(group.first_needed(e), e // group.block_size)}
            expected = [i for i in range(start, end) if i in needed or not group.forgets]

            blocks = kept_blocks(Retention(groups, interval_tokens), group, start, end, boundaries)

            assert blocks == expected, (group, interval_tokens, boundaries, start, end)


@pytest.mark.parametrize("seed", range(10))
def test_a_prompt_named_in_pieces_keeps_what_it_keeps_at_once(seed: int) -> None:
    print(f"seed {seed}")
    pick = random.Random(seed)
    for _ in range(200):
        groups = random_groups(pick)
        unit = alignment(groups)
        retention = Retention(groups, pick.choice([None, 0, unit, 3 * unit]))
        boundaries = [pick.randint(0, 12 * unit) for _ in range(2)]
        for group in groups:
            num_blocks = 12 * unit // group.block_size
            cuts = [0, *sorted(pick.choices(range(num_blocks + 1), k=3)), num_blocks]

            in_pieces: list[int] = []
            for start, end in pairwise(cuts):
                in_pieces += kept_blocks(retention, group, start, end, boundaries)

            assert in_pieces == kept_blocks(retention, group, 0, num_blocks, boundaries)


@pytest.mark.parametrize("seed", range(10))
def test_a_prompt_resumes_at_its_end_and_at_every_interval(seed: int) -> None:
    print(f"seed {seed}")
    pick = random.Random(seed)
    for _ in range(100):
        groups = random_groups(pick)
        unit = alignment(groups)
        interval_tokens = pick.randint(1, 4) * unit
        num_prompt_tokens = pick.randint(1, 12 * unit)
        retention = Retention(groups, interval_tokens)
        named = [
            set(kept_blocks(retention, group, 0, num_prompt_tokens // group.block_size, [num_prompt_tokens - 1]))
            for group in groups
        ]

        def first_hole(group_id: int, start: int, end: int, named: list[set[int]] = named) -> int:
            return next((block_id for block_id in range(start, end) if block_id not in named[group_id]), end)

        replay = (num_prompt_tokens - 1) // unit * unit
        for end in (replay, *range(interval_tokens, num_prompt_tokens + 1, interval_tokens)):
            assert longest_hit(end, groups, first_hole) == end, (groups, interval_tokens, num_prompt_tokens)


def test_long_prompts_are_named_in_few_ranges() -> None:
    window, state = SlidingWindow(16, 1024), RecurrentState(16)
    groups = [FullAttention(16), window, state]
    end = 8192

    assert Retention(groups).kept(window, 0, end, [131071]) == [range(8192)]
    assert Retention(groups, 0).kept(window, 0, end, [131071]) == [range(8127, 8191)]
    assert Retention(groups, 0).kept(groups[0], 0, end, [131071]) == [range(8192)]
    assert Retention(groups, 16).kept(state, 0, end, [131071]) == [range(8192)]
    assert Retention(groups, 512).kept(window, 0, end, [131071]) == [range(8192)]
    assert Retention(groups, 32768).kept(window, 0, end, [131071]) == [
        range(1984, 2048),
        range(4032, 4096),
        range(6080, 6144),
        range(8127, 8192),
    ]


def test_no_blocks_keep_nothing() -> None:
    assert Retention([SlidingWindow(16, 32)]).kept(SlidingWindow(16, 32), 3, 3, [100]) == []


# --- what cannot be


@pytest.mark.parametrize("interval_tokens", [-32, 16, 48])
def test_an_interval_is_a_multiple_of_where_blocks_of_all_groups_end(interval_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"{interval_tokens} tokens is not a multiple of 32"):
        Retention(FULL_32_AND_WINDOW_16, interval_tokens)


def test_an_interval_is_for_models_that_forget() -> None:
    with pytest.raises(ValueError, match="no group forgets"):
        Retention([FullAttention(16), FullAttention(32)], 64)


@pytest.mark.parametrize("interval_tokens", [None, 0])
def test_models_that_never_forget_name_every_block(interval_tokens: int | None) -> None:
    assert Retention([FullAttention(16)], interval_tokens).kept(FullAttention(16), 2, 9, [40]) == [range(2, 9)]


def test_a_chunk_ends_where_the_next_state_is_kept() -> None:
    with_states, without = Retention(FULL_AND_STATE, 128), Retention([FullAttention(16), SlidingWindow(16, 64)], 128)

    assert [with_states.next_end(num, [100, 311]) for num in (0, 95, 96, 128, 250, 256, 304, 383)] == [
        96,
        96,
        128,
        256,
        256,
        304,
        384,
        384,
    ]
    assert without.next_end(0, [100, 311]) is None


def test_without_an_interval_a_chunk_ends_at_the_boundaries_alone() -> None:
    at_ends, everywhere = Retention(FULL_AND_STATE, 0), Retention(FULL_AND_STATE)

    for retention in (at_ends, everywhere):
        assert [retention.next_end(num, [15, 100]) for num in (0, 95, 96)] == [96, 96, None]
