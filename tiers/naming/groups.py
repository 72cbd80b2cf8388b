"""Attention groups: which cached blocks each kind of attention needs to resume a request after a prefix."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import gcd, lcm
from typing import ClassVar, Protocol

FirstHole = Callable[[int, int], int]
"""`first_hole(start, end)` returns the first missing block from *start* to *end* - 1, or *end* if none is missing."""


class BlockGroup(Protocol):
    """The properties of an attention group that the tiers below the device need."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def forgets(self) -> bool:
        """True if tokens read only recent blocks, as with a sliding window.

        If tokens read all blocks, every shorter prefix of a cached prefix can be used too.
        """

    @property
    def keeps_states(self) -> bool:
        """True if a block is a recurrent state, not keys and values."""


class AttentionGroup(BlockGroup, Protocol):
    """The layers that share one kind of attention and therefore one block table."""

    @property
    def resumes_inside(self) -> bool:
        """True if a request can resume in the middle of a block, using only the block's first tokens."""

    def first_needed(self, num_tokens: int) -> int:
        """Return the index of the first block that the token after *num_tokens* tokens reads.

        The token also reads all later blocks. The result never decreases as *num_tokens* grows.
        """

    def longest(self, num_blocks: int, first_hole: FirstHole) -> int:
        """Return the maximum number of blocks, up to *num_blocks*, after which a request can resume in this group.

        *first_hole* finds the first missing block of a range; see `FirstHole`.
        """


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Attention in which every token reads all tokens before it."""

    forgets: ClassVar[bool] = False
    keeps_states: ClassVar[bool] = False
    resumes_inside: ClassVar[bool] = True
    block_size: int

    def first_needed(self, num_tokens: int) -> int:
        return 0

    def longest(self, num_blocks: int, first_hole: FirstHole) -> int:
        return first_hole(0, num_blocks)


class _Windowed:
    """Base of the attention groups whose tokens read only recent blocks."""

    __slots__ = ()
    forgets: ClassVar[bool] = True
    keeps_states: ClassVar[bool] = False
    resumes_inside: ClassVar[bool] = True

    def longest(self: AttentionGroup, num_blocks: int, first_hole: FirstHole) -> int:
        """Return the maximum number of blocks, up to *num_blocks*, after which a request can resume in this group.

        The longest prefix is tried first. If it lacks a needed block, the next prefix to try ends before that block. If
        a token reads w blocks, *first_hole* (which finds a range's first missing block) is called at most
        2 * num_blocks / (w + 1) + 2 times, for example 254 times for 8,192 blocks and w = 64. A recurrent state (w = 1)
        can take one call for each block.
        """
        while num_blocks:
            hole = first_hole(self.first_needed(num_blocks * self.block_size), num_blocks)
            if hole == num_blocks:
                break
            # Every end between the hole and num_blocks needs the missing block too, as first_needed never decreases.
            num_blocks = hole
        return num_blocks


@dataclass(frozen=True, slots=True)
class SlidingWindow(_Windowed):
    """Attention in which a token reads itself and the *window_tokens* - 1 tokens before it."""

    block_size: int
    window_tokens: int

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.window_tokens + 1) // self.block_size


@dataclass(frozen=True, slots=True)
class ChunkedLocal(_Windowed):
    """Attention in which a token reads the tokens before it in its own chunk of *chunk_tokens* tokens."""

    block_size: int
    chunk_tokens: int

    def first_needed(self, num_tokens: int) -> int:
        return num_tokens // self.chunk_tokens * self.chunk_tokens // self.block_size


@dataclass(frozen=True, slots=True)
class RecurrentState(_Windowed):
    """A state space layer, which needs only the state after the last block. States exist only at the ends of blocks."""

    keeps_states: ClassVar[bool] = True
    resumes_inside: ClassVar[bool] = False
    block_size: int

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1) // self.block_size


def state_groups(groups: Iterable[BlockGroup]) -> list[int]:
    """Return the indices of the groups that keep recurrent states."""
    return [group_id for group_id, group in enumerate(groups) if group.keeps_states]


def alignment(groups: Iterable[AttentionGroup]) -> int:
    """Return the least common multiple of the block sizes, in tokens.

    Blocks of all *groups* end together only at multiples of this number, so every hit has such a length.
    """
    return lcm(*(group.block_size for group in groups))


def name_block_size(groups: Iterable[AttentionGroup]) -> int:
    """Return the number of tokens that one block name covers: the greatest common divisor of the block sizes.

    So the block size of every group is a multiple of it.
    """
    return gcd(*(group.block_size for group in groups))


def longest_hit(
    num_tokens: int,
    groups: Sequence[AttentionGroup],
    first_hole: Callable[[int, int, int], int],
    group_ids: Iterable[int] | None = None,
) -> int:
    """Return the maximum number of tokens, up to *num_tokens*, after which a request can resume in all *groups*.

    The result is a multiple of `alignment`. `first_hole(group_id, start, end)` returns the first block from *start* to
    *end* - 1 that is missing in the group, or *end* if none is missing. It may be called several times for a group. If
    *group_ids* is given, only these groups are considered.

    Groups whose tokens read all blocks are evaluated once. The other groups are evaluated in turn until they all accept
    the same result. Each evaluation can only shorten the result.
    """

    def longest(group_id: int, num_tokens: int) -> int:
        group = groups[group_id]
        return group.longest(num_tokens // group.block_size, partial(first_hole, group_id)) * group.block_size

    unit = alignment(groups)
    num_tokens = num_tokens // unit * unit
    forgetful = []
    for group_id in range(len(groups)) if group_ids is None else group_ids:
        if groups[group_id].forgets:
            forgetful.append(group_id)
        else:
            num_tokens = longest(group_id, num_tokens) // unit * unit

    num_agreed = 0
    for group_id in cycle(forgetful):
        end = longest(group_id, num_tokens)
        num_agreed = num_agreed + 1 if end == num_tokens else int(end % unit == 0)
        num_tokens = end // unit * unit
        if num_agreed == len(forgetful):
            break
    return num_tokens


def longest_single(
    num_tokens: int, groups: Sequence[AttentionGroup], first_hole: Callable[[int, int, int], int]
) -> int:
    """Return the longest hit, in tokens, in the groups with full attention. All other groups are ignored.

    If no group has full attention, each group has its own longest hit, and the longest of these is returned. The result
    is a multiple of `alignment`.

    If the result is longer than `longest_hit`, its end is called a *junction*: the prefix was requested before, but
    other groups (sliding windows, recurrent states) have not kept the blocks that are needed to resume after it. These
    blocks should be kept now, so that the next request finds them.
    """
    lasting = [group_id for group_id, group in enumerate(groups) if not group.forgets]
    alone = [lasting] if lasting else [[group_id] for group_id in range(len(groups))]
    return max(longest_hit(num_tokens, groups, first_hole, group_ids) for group_ids in alone)
