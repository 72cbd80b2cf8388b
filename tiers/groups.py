"""Attention groups: which blocks must be present to go on after a given token? One class per kind of attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import ClassVar, Protocol

Holds = Callable[[int], bool]  # is block i present?


class AttentionGroup(Protocol):
    """The layers that share one kind of attention, and so one table of blocks."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def forgets(self) -> bool:
        """Whether later tokens stop reading earlier blocks. If not, every shorter prefix of a hit is a hit."""

    def first_needed(self, num_tokens: int) -> int:
        """The first block that the token after *num_tokens* still reads; it reads all from there on.

        Never decreases with *num_tokens*.
        """

    def longest(self, num_blocks: int, holds: Holds) -> int:
        """The largest number of blocks <= *num_blocks* after which this group can resume."""


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token reads all tokens before it."""

    forgets: ClassVar[bool] = False
    block_size: int

    def first_needed(self, num_tokens: int) -> int:
        return 0

    def longest(self, num_blocks: int, holds: Holds) -> int:
        # From the left, so that a prompt never seen costs one question and not one per block.
        return next((i for i in range(num_blocks) if not holds(i)), num_blocks)


class _Windowed:
    """Groups that forget: the newest blocks alone decide, so the longest prefix is tried first."""

    __slots__ = ()
    forgets: ClassVar[bool] = True

    def longest(self: AttentionGroup, num_blocks: int, holds: Holds) -> int:
        while num_blocks:
            first = self.first_needed(num_blocks * self.block_size)
            hole = next((i for i in range(first, num_blocks) if not holds(i)), None)
            if hole is None:
                return num_blocks
            # Every end between the first hole and here needs it too, because first_needed never decreases.
            num_blocks = hole
        return 0


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
    """A state space layer: the state after the last block is all it needs."""

    block_size: int

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1) // self.block_size


def longest_hit(num_blocks: int, groups: Sequence[AttentionGroup], holds: Callable[[int, int], bool]) -> int:
    """The largest number of blocks <= *num_blocks* after which all *groups* can resume.

    `holds(group_id, block_id)` tells whether a block is present; it is asked, never told. Groups that never forget are
    asked once; then a small fixed point: each other group may only shrink the answer, until all agree on it in a row.
    """
    forgetful = []
    for group_id, group in enumerate(groups):
        if group.forgets:
            forgetful.append(group_id)
        else:
            num_blocks = group.longest(num_blocks, partial(holds, group_id))
    num_agreed = 0
    for group_id in cycle(forgetful):
        longest = groups[group_id].longest(num_blocks, partial(holds, group_id))
        num_agreed = num_agreed + 1 if longest == num_blocks else 1
        num_blocks = longest
        if num_agreed == len(forgetful):
            break
    return num_blocks
