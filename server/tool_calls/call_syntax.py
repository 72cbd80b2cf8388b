"""CallSyntax: the format in which one family of models writes tool calls, and the interface of its parsers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class NotACall(ValueError):
    """Error for a text that begins like a call but is not one."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call found in an answer: the tool's name, and the arguments as the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Block:
    """One or more calls that are written together, such as a JSON list. *end* is the index in the text after them."""

    end: int
    calls: Sequence[ParsedCall]


class BlockReader(Protocol):
    """A parser of one block of calls in an answer that is still being generated."""

    def read(self, text: str) -> Block | None:
        """Return the block in *text*, or None if it is incomplete. Raise `NotACall` if it cannot become a block."""


class BlockBegin(Protocol):
    """A factory of block readers."""

    def __call__(self, start: int) -> BlockReader:
        """Return a reader that parses the answer's text from index *start* on, where a block may begin."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """The exact format of a family's calls, which a grammar enforces.

    One call consists of *before*, the tool's name, *between*, the arguments, and *after*. *opening* precedes the first
    call of an answer, *separator* is between two calls, and *closing* follows the last call.
    """

    before: str
    between: str
    after: str = "}"
    separator: str = "\n"
    opening: str = ""
    closing: str = ""

    @property
    def marker(self) -> str:
        """Text with which the first call begins."""
        return self.opening + self.before


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The format in which a family of models writes tool calls.

    A grammar makes the model write calls exactly like *shape*. Without a grammar, other forms are accepted too:

    - A block of calls begins with one of *markers*. If *is_bare*, a block that no text precedes needs no marker.
    - A reader that *block* creates parses what follows the marker.
    - One of *trailers* may follow the block, and is dropped.

    *special* lists the parts of calls that may be special tokens. Decoding must keep these tokens in the text.
    """

    name: str
    shape: CallShape
    block: BlockBegin
    markers: tuple[str, ...] = ()
    trailers: tuple[str, ...] = ()
    is_bare: bool = False
    special: tuple[str, ...] = ()
