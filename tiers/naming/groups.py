"""Attention groups: which blocks must be present to go on after a given token? One class per kind of attention."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import gcd, lcm
from typing import ClassVar, Protocol

FirstHole = Callable[[int, int], int]
"""`first_hole(start, end)`: the first of the blocks *start* to *end* - 1 that is not present, or *end*."""


class BlockGroup(Protocol):
    """Blocks of equal size, with a table of their own: all that the tiers below the device know of a group."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def forgets(self) -> bool:
        """Whether later tokens stop reading earlier blocks. If not, every shorter prefix of a hit is a hit."""


class AttentionGroup(BlockGroup, Protocol):
    """The layers that share one kind of attention, and so one table of blocks."""

    @property
    def resumes_inside(self) -> bool:
        """Whether the first tokens of a block are of use without the rest: a request may go on from its middle."""

    def first_needed(self, num_tokens: int) -> int:
        """The first block that the token after *num_tokens* still reads; it reads all from there on.

        Never decreases with *num_tokens*.
        """

    def longest(self, num_blocks: int, first_hole: FirstHole) -> int:
        """The largest number of blocks, *num_blocks* at most, after which a request can go on in this group."""


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token reads all tokens before it."""

    forgets: ClassVar[bool] = False
    resumes_inside: ClassVar[bool] = True
    block_size: int

    def first_needed(self, num_tokens: int) -> int:
        return 0

    def longest(self, num_blocks: int, first_hole: FirstHole) -> int:
        return first_hole(0, num_blocks)


class _Windowed:
    """What groups that forget have in common: the newest blocks alone decide, so the longest prefix is tried first."""

    __slots__ = ()
    forgets: ClassVar[bool] = True
    resumes_inside: ClassVar[bool] = True

    def longest(self: AttentionGroup, num_blocks: int, first_hole: FirstHole) -> int:
        """See `AttentionGroup.longest`. It asks one question for each end that it tries, and tries few:

        Two failures in a row pass a whole window and a hole, so windows of w blocks cost at most
        2 * num_blocks / (w + 1) + 2 questions, num_blocks / w when nothing is there. Any search needs that many: a hole
        hides what is behind it. (8,192 blocks, window of 64: at most 254. A recurrent state, w = 1: 8,192.)
        """
        while num_blocks:
            hole = first_hole(self.first_needed(num_blocks * self.block_size), num_blocks)
            if hole == num_blocks:
                break
            # Every end between the hole and here needs it too, because first_needed never decreases.
            num_blocks = hole
        return num_blocks


@dataclass(frozen=True, slots=True)
class SlidingWindow(_Windowed):
    """A token reads itself and the *window_tokens* - 1 tokens before it."""

    block_size: int
    window_tokens: int

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.window_tokens + 1) // self.block_size


@dataclass(frozen=True, slots=True)
class ChunkedLocal(_Windowed):
    """A token reads the tokens before it in its own chunk of *chunk_tokens*."""

    block_size: int
    chunk_tokens: int

    def first_needed(self, num_tokens: int) -> int:
        return num_tokens // self.chunk_tokens * self.chunk_tokens // self.block_size


@dataclass(frozen=True, slots=True)
class RecurrentState(_Windowed):
    """A state space layer: the state after the last block is all it needs, and there is none within a block."""

    resumes_inside: ClassVar[bool] = False
    block_size: int

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1) // self.block_size


def alignment(groups: Iterable[AttentionGroup]) -> int:
    """Tokens from one place where blocks of all *groups* end to the next: hits are multiples of it."""
    return lcm(*(group.block_size for group in groups))


def name_block_size(groups: Iterable[AttentionGroup]) -> int:
    """Tokens per name, so that a block of any of *groups* ends where a name does."""
    return gcd(*(group.block_size for group in groups))


def longest_hit(num_tokens: int, groups: Sequence[AttentionGroup], first_hole: Callable[[int, int, int], int]) -> int:
    """The largest number of tokens, *num_tokens* at most, after which a request can go on in all *groups*.

    A multiple of `alignment`. `first_hole(group_id, start, end)` is the group's `FirstHole`, in blocks of its own size;
    it must change nothing.
    """
    return _longest_agreed(num_tokens, range(len(groups)), groups, first_hole)


def longest_single(
    num_tokens: int, groups: Sequence[AttentionGroup], first_hole: Callable[[int, int, int], int]
) -> int:
    """The longest hit that some groups would give alone: those that never forget or, if all forget, the best of them.

    Aligned as `longest_hit`. Where it is longer, it ends at a *junction*: a prefix that has come a second time, so that
    the blocks to resume after it, not worth naming the first time, are now.
    """
    lasting = [group_id for group_id, group in enumerate(groups) if not group.forgets]
    alone = [lasting] if lasting else [[group_id] for group_id in range(len(groups))]
    return max(_longest_agreed(num_tokens, group_ids, groups, first_hole) for group_ids in alone)


def _longest_agreed(
    num_tokens: int,
    group_ids: Iterable[int],
    groups: Sequence[AttentionGroup],
    first_hole: Callable[[int, int, int], int],
) -> int:
    """The `longest_hit` of the groups *group_ids* alone, aligned to all groups.

    Groups that never forget are asked once; then a small fixed point: each other group may only shrink the answer,
    until all agree on it in a row.
    """

    def longest(group_id: int, num_tokens: int) -> int:
        group = groups[group_id]
        return group.longest(num_tokens // group.block_size, partial(first_hole, group_id)) * group.block_size

    unit = alignment(groups)
    num_tokens = num_tokens // unit * unit
    forgetful = []
    for group_id in group_ids:
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
