"""Formats of prompts: token ids or text.

A prompt is made as a sequence of *pieces*, and then converted to its format. A piece is a number that stands for one
token or one word.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

WORDS = tuple(
    """
    able acid aged also area army away baby back ball band bank base bath bear beat bell belt best bird blow blue boat
    body bone book born both bowl bulk burn bush busy cake call calm camp card care case cash cast cell chat chip city
    club coal coat code cold come cook cool cope copy core cost crew crop dark data date dawn days dead deal dean dear
    debt deep deny desk dial diet disc disk door dose down draw drew drop drug dual duke dust duty each earn ease east
    easy edge else even ever evil exit face fact fail fair fall farm fast fate fear feed feel feet fell felt file fill
    film find fine fire firm fish five flat flow food foot ford form fort four free from fuel full fund gain game gate
    gave gear gene gift girl give glad goal goes gold golf gone good gray grew grey grow gulf hair half hall hand hang
    hard harm hate have head hear heat held hell help here hero high hill hire hold hole holy home hope host hour huge
    hung hunt hurt idea inch into iron item join jump jury just keen keep kept kick kill kind king knee knew know lack
    lady laid lake land lane last late lead left less life lift like line link list live load loan lock logo long look
    """.split()  # noqa: SIM905  # a list of two hundred quoted strings is hard to read
)
# Token ids for a server without `/tokenize`: they are bytes or letters in every vocabulary.
_FIRST_ID, _NUM_IDS = 3, 250


class PromptFormat(Protocol):
    """A format that converts the pieces of a prompt to token ids or text."""

    @property
    def is_exact(self) -> bool:
        """True if each piece becomes exactly one token."""
        ...

    @property
    def num_pieces(self) -> int:
        """Number of different tokens or words in prompts. Each of them (a piece) is given as a number below this."""
        ...

    def write(self, pieces: Sequence[int]) -> str | list[int]:
        """Convert a prompt, given as the numbers of its tokens or words, to the form that `/v1/completions` accepts."""
        ...

    def pieces_of(self, num_tokens: int) -> int:
        """Return how many pieces (tokens or words) a prompt of about *num_tokens* tokens has."""
        ...


@dataclass(frozen=True)
class TokenIds:
    """The format of prompts that are sent as token ids. `write` converts each number *i* in a prompt to `ids[i]`."""

    ids: tuple[int, ...] = tuple(range(_FIRST_ID, _FIRST_ID + _NUM_IDS))
    is_exact = True

    @property
    def num_pieces(self) -> int:
        return len(self.ids)

    def write(self, pieces: Sequence[int]) -> list[int]:
        return [self.ids[piece] for piece in pieces]

    def pieces_of(self, num_tokens: int) -> int:
        return num_tokens


@dataclass(frozen=True)
class Words:
    """The format of prompts that are sent as text. `write` converts each number *i* in a prompt to `WORDS[i]`.

    *tokens_per_word* is the average number of tokens of a word.
    """

    tokens_per_word: float
    is_exact = False
    num_pieces = len(WORDS)

    def write(self, pieces: Sequence[int]) -> str:
        return " ".join(WORDS[piece] for piece in pieces)

    def pieces_of(self, num_tokens: int) -> int:
        return max(1, round(num_tokens / self.tokens_per_word))
