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
    end_token_ids: frozenset[int]
    end_mark: int  # with this id, which may be no token of the model, a matcher says that the text may end

    @property
    def num_bits(self) -> int:
        """How many tokens a mask is about, a multiple of 32."""
        return -(-max(self.size, self.end_mark + 1) // 32) * 32


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar. Any number of answers may follow it at once, and any thread may begin one."""

    start: "LLMatcher"  # before the first token; it is copied and stays there
    vocabulary: Vocabulary

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
        self._ends = frozenset(token_id for token_id in end_token_ids if 0 <= token_id < vocabulary.size)
        self.has_failed = False  # the grammar was too costly, or no token of the model goes on in it
        self._allowed = np.zeros(0, dtype=np.uint8)

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing can follow it."""
        return not self.has_failed and self.matcher.is_stopped()

    @property
    def allowed(self) -> npt.NDArray[np.bool_]:
        """Whether each token may be drawn next, `[vocab]`; known once `find_allowed` was called after the last."""
        bits = np.unpackbits(self._allowed, count=self.vocabulary.size, bitorder="little")
        return bits.view(np.bool_)

    def take(self, mask: npt.NDArray[np.uint8]) -> None:
        """Take over the matcher's *mask*: a bit for each token, and of a byte the lowest bit first."""
        if self.matcher.is_error():
            self.has_failed = True
        may_end = mask[self.vocabulary.end_mark >> 3] >> (self.vocabulary.end_mark & 7) & 1
        for token_id in (self.vocabulary.end_mark, *self.vocabulary.end_token_ids):
            mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
        if may_end:
            for token_id in self._ends:
                mask[token_id >> 3] |= 1 << (token_id & 7)
        if not mask.any():
            self.has_failed = True
        self._allowed = mask

    def on_drawn(self, token_id: int) -> None:
        """Take note of the token that was drawn."""
        if not self.has_failed and token_id not in self._ends and not self.matcher.consume_token(token_id):
            self.has_failed = True


def find_allowed(states: Sequence[GrammarState]) -> None:
    """Find what may be drawn next in each of the *states*, all of one vocabulary, on several threads."""
    from llguidance.numpy import fill_next_token_bitmask_par

    masks = np.zeros((len(states), states[0].vocabulary.num_bits // 32), dtype=np.int32)
    fill_next_token_bitmask_par(_executor(), [(state.matcher, row) for row, state in enumerate(states)], masks)
    for state, mask in zip(states, masks.view(np.uint8), strict=True):
        state.take(mask)


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor()
