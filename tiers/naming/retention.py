"""Retention: the choice of blocks to name, so that later prompts can find them.

Only groups that forget have a choice. Their tokens read only recent blocks, as with a sliding window or a recurrent
state. All other groups name every block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile

from kvtier.tiers.naming.groups import AttentionGroup, alignment

# A long prompt usually ends with a question, and the next prompt with the same document differs only in the question.
# Where the question begins is unknown, but it is rarely longer than this number of tokens.
QUESTION_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Retention:
    """A policy that chooses which blocks get a name, so that later prompts can find them.

    Blocks of groups with full attention all get one. If *interval_tokens* is None, so do the blocks of other groups.

    Otherwise, in a group whose tokens read only recent blocks, the *tails* of some prefixes get a name: the blocks that
    are needed to resume after the prefix. These prefixes end at the *boundaries* that the caller passes to `kept`, and
    at every multiple of *interval_tokens*. If *interval_tokens* is 0, they end only at the boundaries.
    """

    groups: Sequence[AttentionGroup]
    interval_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.interval_tokens:
            return
        unit = alignment(self.groups)
        if self.interval_tokens < 0 or self.interval_tokens % unit:
            raise ValueError(
                f"retention: an interval of {self.interval_tokens} tokens is not a multiple of {unit}, "
                f"the least common multiple of the block sizes; try {max(1, round(self.interval_tokens / unit)) * unit}"
            )
        if not any(group.forgets for group in self.groups):
            raise ValueError(
                f"retention: an interval of {self.interval_tokens} tokens has no effect, because no group forgets: "
                "every layer attends to all tokens; remove it"
            )

    def next_end(self, num_tokens: int, boundaries: Sequence[int]) -> int | None:
        """Return the next position after *num_tokens* where a chunk must end so that a recurrent state is kept there.

        A state exists only at the end of a chunk. *boundaries* are as in `kept`. Returns None if no such position lies
        ahead, or if no group keeps states.
        """
        if not self._has_states:
            return None
        unit = alignment(self.groups)
        ends = [end for boundary in boundaries if (end := boundary // unit * unit) > num_tokens]
        if self.interval_tokens:
            ends.append((num_tokens // self.interval_tokens + 1) * self.interval_tokens)
        return min(ends, default=None)

    def likely_ends(self, num_tokens: int) -> list[int]:
        """Return positions up to *num_tokens* where an earlier prompt probably kept what is needed to resume.

        That prompt has the first *num_tokens* tokens in common with another one. The positions are those at which its
        end or its question may lie, from the last one, and the last multiple of the interval.
        """
        unit = alignment(self.groups)
        ends = list(range(num_tokens // unit * unit, max(0, num_tokens - QUESTION_TOKENS - unit), -unit))
        if self.interval_tokens:
            ends.append(num_tokens // self.interval_tokens * self.interval_tokens)
        return ends

    @property
    def _has_states(self) -> bool:
        return any(group.keeps_states for group in self.groups)

    def kept(self, group: AttentionGroup, start_block: int, end_block: int, boundaries: Sequence[int]) -> list[range]:
        """Return which of the group's blocks *start_block* to *end_block* - 1 should be findable by later prompts.

        The ranges in the result are ascending and disjoint. They include blocks that are needed only to resume at a
        later position than *end_block*. So the result is the same if a prompt's blocks are passed in several calls.

        *boundaries* are the token positions at which later prompts are expected to resume: the end of a prefix that an
        earlier prompt had too (see `longest_single`); the prompt's length minus one, because the last token is always
        computed; and `QUESTION_TOKENS` before that. Each position is rounded down to a multiple of `alignment`.
        """
        if self.interval_tokens is None or not group.forgets:
            return [range(start_block, end_block)] if start_block < end_block else []

        unit = alignment(self.groups)
        ends = {boundary // unit * unit for boundary in boundaries}
        if self.interval_tokens:
            first_end = start_block * group.block_size // self.interval_tokens * self.interval_tokens
            every = count(first_end, self.interval_tokens)
            ends.update(takewhile(lambda end: group.first_needed(end) < end_block, every))

        kept: list[range] = []
        for end in sorted(ends):  # first_needed never decreases, so the tails are in order too
            tail = range(max(start_block, group.first_needed(end)), min(end_block, end // group.block_size))
            if tail and kept and tail.start <= kept[-1].stop:
                kept[-1] = range(kept[-1].start, tail.stop)
            elif tail:
                kept.append(tail)
        return kept
