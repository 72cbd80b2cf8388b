"""Grammar: what the text of answers has to be, compiled; and how far one answer is in it."""

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
    """The tokens that grammars are about: how many the model has logits for, and which of them end its texts."""

    size: int
    ends: Sequence[int]
    num_matched: int  # tokens that matchers know
    end_mark: int  # one of them, and none of the model: with it they say that the text may end


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar. Any number of answers may follow it at once, and any thread may begin one."""

    start: "LLMatcher"  # before the first token; it is copied and stays there
    vocabulary: Vocabulary
    num_bytes: int  # of memory, about
    left_out: Sequence[str] = ()  # keywords of the schema that it does not enforce

    def begin(self, end_token_ids: Iterable[int]) -> "GrammarState":
        """The state of an answer that has no token yet, and that *end_token_ids* end."""
        return GrammarState(self.start.deep_copy(), self.vocabulary, end_token_ids)


class GrammarState:
    """How far one answer is in its grammar. Owned by the sampler of its request.

    It follows from the tokens that were drawn, so a request that is preempted goes on where it was. Tokens that end the
    text may be drawn where the grammar lets it end, and nowhere else.
    """

    def __init__(self, matcher: "LLMatcher", vocabulary: Vocabulary, end_token_ids: Iterable[int]) -> None:
        """Takes over the *matcher*."""
        self.matcher = matcher
        self.vocabulary = vocabulary
        self._ends = [token_id for token_id in end_token_ids if 0 <= token_id < vocabulary.size]
        self.has_failed = False  # the grammar was too costly, or no token of the model goes on in it
        self._allowed = np.zeros(vocabulary.size, dtype=np.bool_)  # which tokens may be drawn next
        self.allows_majority = False
        self.exceptions: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing can follow it."""
        return not self.has_failed and self.matcher.is_stopped()

    def take(self, mask: npt.NDArray[np.uint8]) -> None:
        """Learn from the matcher's *mask* what may be drawn next. Of its bytes the lowest bits are the first tokens."""
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
        """The token if it may be drawn, else the first that may: a row without numbers, or all banned, gives any."""
        return token_id if self._allowed[token_id] else int(self._allowed.argmax())

    def on_drawn(self, token_id: int) -> None:
        """Take note of the token that was drawn."""
        if not self.has_failed and token_id not in self._ends and not self.matcher.consume_token(token_id):
            self.has_failed = True


def find_allowed(states: Sequence[GrammarState]) -> None:
    """Find what may be drawn next in each of the *states*, all of one vocabulary, on several threads."""
    from llguidance.numpy import fill_next_token_bitmask_par

    masks = np.zeros((len(states), -(-states[0].vocabulary.num_matched // 32)), dtype=np.int32)
    fill_next_token_bitmask_par(_executor(), [(state.matcher, row) for row, state in enumerate(states)], masks)
    for state, mask in zip(states, masks.view(np.uint8), strict=True):
        state.take(mask)


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor()
