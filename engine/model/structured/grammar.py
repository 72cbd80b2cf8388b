"""Grammar: a compiled constraint on the text of completions; GrammarState: one completion's position in it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # an optional package
    from llguidance import LLExecutor, LLMatcher


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The sizes and end tokens of the model's vocabulary and of the vocabulary that llguidance's matchers know.

    A matcher is an object of llguidance that checks one text, token by token. It knows the tokens of the tokenizer,
    whose number may differ from that of the model's logits.
    """

    size: int  # number of the model's logits
    ends: Sequence[int]  # the model's end tokens
    num_matched: int  # number of tokens that matchers know
    end_mark: int  # a token id that only matchers have; they allow it where the text may end


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar. Any number of completions may use it at once, and any thread may call `begin`."""

    start: "LLMatcher"  # the state before the first token; only copies of it advance
    vocabulary: Vocabulary
    num_bytes: int  # approximate size in memory
    left_out: Sequence[str] = ()  # keywords of the schema that are not enforced

    def begin(self, end_token_ids: Iterable[int]) -> "GrammarState":
        """Return the state of a new completion, which ends at one of *end_token_ids*."""
        return GrammarState(self.start.deep_copy(), self.vocabulary, end_token_ids)


class GrammarState:
    """The position of a completion in its grammar, which determines the tokens that may be sampled next.

    The position depends only on the sampled tokens, so a preempted request continues where it was. End tokens are
    allowed only where the grammar lets the text end. Owned by the sampler of its request.
    """

    def __init__(self, matcher: "LLMatcher", vocabulary: Vocabulary, end_token_ids: Iterable[int]) -> None:
        """Create the state, which takes ownership of the *matcher*."""
        self.matcher = matcher
        self.vocabulary = vocabulary
        self._ends = [token_id for token_id in end_token_ids if 0 <= token_id < vocabulary.size]
        self.has_failed = False  # whether the grammar was too costly, or allowed none of the model's tokens
        self._allowed = np.zeros(vocabulary.size, dtype=np.bool_)  # the tokens that may be sampled next
        self.allows_majority = False  # whether more than half of the tokens may be sampled next
        # Ids of the forbidden tokens if `allows_majority`, else of the allowed tokens.
        self.exceptions: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    @property
    def is_complete(self) -> bool:
        """True if the text is complete and no token can follow it."""
        return not self.has_failed and self.matcher.is_stopped()

    def take(self, mask: npt.NDArray[np.uint8]) -> None:
        """Set the allowed next tokens from the bitmask *mask*, in which the lowest bit of each byte comes first."""
        vocabulary = self.vocabulary
        matched = np.unpackbits(mask, count=vocabulary.num_matched, bitorder="little").view(np.bool_)
        may_end = matched[vocabulary.end_mark]
        matched[vocabulary.end_mark] = False
        num_known = min(vocabulary.size, vocabulary.num_matched)
        self._allowed[:num_known] = matched[:num_known]
        self._allowed[vocabulary.ends] = False
        if may_end:
            self._allowed[self._ends] = True
        num_allowed = np.count_nonzero(self._allowed)
        self.allows_majority = bool(2 * num_allowed > vocabulary.size)
        self.exceptions = np.flatnonzero(~self._allowed if self.allows_majority else self._allowed)
        if self.matcher.is_error() or not num_allowed:
            self.has_failed = True

    def nearest(self, token_id: int) -> int:
        """Return the token if it is allowed, otherwise the allowed token with the lowest id.

        A disallowed token is sampled if a row of logits has no finite value or every allowed token is banned.
        """
        return token_id if self._allowed[token_id] else int(self._allowed.argmax())

    def on_drawn(self, token_id: int) -> None:
        """Advance by the sampled token."""
        if not self.has_failed and token_id not in self._ends and not self.matcher.consume_token(token_id):
            self.has_failed = True


def find_allowed(states: Sequence[GrammarState]) -> None:
    """Compute the allowed next tokens of all *states*, which share a vocabulary, on several threads."""
    from llguidance.numpy import fill_next_token_bitmask_par

    masks = np.zeros((len(states), -(-states[0].vocabulary.num_matched // 32)), dtype=np.int32)
    fill_next_token_bitmask_par(_executor(), [(state.matcher, row) for row, state in enumerate(states)], masks)
    for state, mask in zip(states, masks.view(np.uint8), strict=True):
        state.take(mask)


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor()
