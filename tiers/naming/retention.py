"""Retention: which blocks of a group that forgets get a name, so that a later prompt can go on from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile

from kvtier.tiers.naming.groups import AttentionGroup, alignment


@dataclass(frozen=True, slots=True)
class Retention:
    """Gives every block a name, or the *tails* of some prefixes only: the blocks still needed to go on after them.

    Tails are named of the prefixes that the caller gives (a prompt's end, junctions), and one more every
    *interval_tokens*: None names every block, 0 no further tails. Where a group never forgets every block gets a name.
    """

    groups: Sequence[AttentionGroup]
    interval_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.interval_tokens:
            return
        unit = alignment(self.groups)
        if self.interval_tokens < 0 or self.interval_tokens % unit:
            raise ValueError(
                f"retention: an interval of {self.interval_tokens} tokens is no multiple of {unit}, "
                f"where blocks of all groups end; try {max(1, round(self.interval_tokens / unit)) * unit}"
            )
        if not any(group.forgets for group in self.groups):
            raise ValueError(
                f"retention: an interval of {self.interval_tokens} tokens, but no group forgets; leave it out"
            )

    def kept(self, group: AttentionGroup, start_block: int, end_block: int, boundaries: Sequence[int]) -> list[range]:
        """Which of *group*'s blocks *start_block* to *end_block* - 1 to name: in order, joined where they meet.

        *boundaries* are positions in tokens that a later prompt is expected to resume at or shortly before: one less
        than the prompt's length, because the last token is always computed, and junctions. Blocks of a tail that ends
        beyond *end_block* are among them, so that a prompt can be named in pieces.
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
        for end in sorted(ends):  # first_needed never decreases, so tails come in order too
            tail = range(max(start_block, group.first_needed(end)), min(end_block, end // group.block_size))
            if tail and kept and tail.start <= kept[-1].stop:
                kept[-1] = range(kept[-1].start, tail.stop)
            elif tail:
                kept.append(tail)
        return kept
