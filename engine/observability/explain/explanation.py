"""Explanation: the reasons, block by block, why a prompt was a hit or a miss."""

from dataclasses import dataclass
from enum import StrEnum

from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier


class Why(StrEnum):
    """Reasons for misses that occur only in explanations, in addition to those of `Reason`."""

    OTHER = "other"  # the tokens were seen with another salt, adapter or namespace; the row says which field
    OTHER_TEMPLATE = "other_template"  # the same messages were seen, but the template rendered another text
    SHORT = "shorter_than_block"  # the prompt has no full block
    BEHIND = "behind_a_missed_block"  # the block is in a tier, but an earlier block of the prompt is not
    FORGOTTEN = "evicted_long_ago"  # seen before, but the record of its eviction is gone


@dataclass(frozen=True, slots=True)
class ExplainedRun:
    """Consecutive tokens with the same outcome: they came from *tier*, or were computed for the reason *why*."""

    start: int  # the first token
    end: int  # the token after the last
    tier: Tier | None
    why: Reason | Why | None = None  # None for tokens that came from a tier
    cause: EvictionCause | None = None  # cause of the eviction, if *why* is an eviction
    evicted_at: tuple[float, float] | None = None  # first and last eviction, in seconds since the Unix epoch
    during: tuple[str, ...] = ()  # the tenant's own requests that ran during the eviction, or the last one before
    differs: tuple[str, ...] = ()  # the fields, such as the salt, that differed in an earlier prompt with these tokens
    is_copied: bool = False  # whether the tokens came from a block that shares only its first tokens with the prompt


@dataclass(frozen=True, slots=True)
class Departure:
    """The point at which a prompt begins to differ from the most similar earlier prompt.

    The two prompts share their first *num_shared* tokens. *departs* is False if one of them ends there. *text* is the
    prompt's next token, and *before* is the text in front of it. Both are set only if the client sends the prompt when
    it asks for the explanation, because kvtier keeps no text.
    """

    num_shared: int
    departs: bool
    text: str | None = None
    before: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """An explanation of why the tokens of one prompt were found in the cache or not.

    The rows cover all tokens in order, without gaps. *request_id* is None if the prompt belongs to no request, because
    a client asked what it would hit now.
    """

    request_id: str | None
    arrived_at: float | None
    num_tokens: int
    block_size: int
    rows: tuple[ExplainedRun, ...]
    departure: Departure | None  # None if no known prompt shares a token
    notes: tuple[str, ...] = ()  # what the explanation cannot tell, one line each

    def check(self) -> None:
        """Raise AssertionError unless the rows cover each token once, and each row is either a hit or a miss."""
        ends = [0, *(row.end for row in self.rows)]
        assert [row.start for row in self.rows] == ends[:-1], "a gap between rows, or two rows for a token"
        assert ends[-1] == self.num_tokens, f"rows up to token {ends[-1]} of {self.num_tokens}"
        assert all(row.start < row.end for row in self.rows), "a row without a token"
        assert all((row.tier is None) != (row.why is None) for row in self.rows), "a token with no outcome, or two"
