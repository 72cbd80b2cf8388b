"""Explanation: block by block why a prompt was found in the cache or not."""

from dataclasses import dataclass
from enum import StrEnum

from kvtier.tiers.naming.eviction import EvictionCause
from kvtier.tiers.naming.tier import Reason, Tier


class Why(StrEnum):
    """Why blocks were not taken from the cache, beside the reasons of `Reason`."""

    OTHER = "other"  # seen with another salt, adapter or namespace; the row says which field
    OTHER_TEMPLATE = "other_template"  # the same messages were seen, and the template made other text of them
    SHORT = "shorter_than_block"  # the prompt has no full block
    BEHIND = "behind_a_missed_block"  # in a tier, but a block before it is not
    FORGOTTEN = "evicted_long_ago"  # seen before, and evicted so long ago that nobody remembers how


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of blocks in a row for which the same holds: they came from *tier*, or were computed because of *why*."""

    start: int  # the first token …
    end: int  # … and the one after the last
    tier: Tier | None
    why: Reason | Why | None = None  # None for tokens that came from a tier
    cause: EvictionCause | None = None  # for which the tier of *why* evicted them
    evicted_at: tuple[float, float] | None = None  # the first and the last of them, since the Unix epoch
    during: tuple[str, ...] = ()  # the asker's own requests that ran when they were evicted, or had run last
    differs: tuple[str, ...] = ()  # the fields in which the way that these tokens were seen in differs
    is_copied: bool = False  # out of a block that shares only its first tokens with the prompt


@dataclass(frozen=True, slots=True)
class Departure:
    """Where a prompt departs from the nearest one that is known, which shares its first *num_shared* tokens.

    *departs* is False if one of the two ends there. *text* is that of the first token after them, and *before* what
    comes before it: of the asker's own prompt, and only if it was given with the question.
    """

    num_shared: int
    departs: bool
    text: str | None = None
    before: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """All tokens of one prompt, in rows without a gap. *request_id* is None for a prompt that was only asked about."""

    request_id: str | None
    arrived_at: float | None
    num_tokens: int
    block_size: int
    rows: tuple[Row, ...]
    departure: Departure | None  # None if no known prompt shares a token
    notes: tuple[str, ...] = ()  # what could not be known, in a line each

    def check(self) -> None:
        """Raise AssertionError if a token is in no row, or in two."""
        ends = [0, *(row.end for row in self.rows)]
        assert [row.start for row in self.rows] == ends[:-1], "a gap between rows, or two rows for a token"
        assert ends[-1] == self.num_tokens, f"rows up to token {ends[-1]} of {self.num_tokens}"
        assert all(row.start < row.end for row in self.rows), "a row without a token"
        assert all((row.tier is None) != (row.why is None) for row in self.rows), "a token with no answer, or two"
