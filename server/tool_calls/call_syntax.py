"""CallSyntax: the format in which one family of models writes tool calls, and the interface of its parsers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class NotACall(ValueError):
    """Error for a text that begins like a tool call but is not one."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call found in an answer: the tool's name, and the arguments as the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Block:
    """A group of tool calls that the model writes together, for example as a JSON list.

    *end* is the index of the first character of the text after these calls.
    """

    end: int
    calls: Sequence[ParsedCall]


class BlockReader(Protocol):
    """A parser of one block of tool calls (see `Block`) in an answer that is still being generated."""

    def read(self, text: str) -> Block | None:
        """Return the block of tool calls in *text*, the answer so far, or None if the block is incomplete.

        Raises `NotACall` if no continuation of the text can make it a block of tool calls.
        """


class BlockBegin(Protocol):
    """A factory of `BlockReader` objects, which parse blocks of tool calls."""

    def __call__(self, start: int) -> BlockReader:
        """Return a parser for the answer's text from index *start* on, where a block of tool calls may begin."""


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
        """Text with which a model begins the first tool call of an answer."""
        return self.opening + self.before


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The format in which a family of models writes tool calls.

    A grammar makes the model write calls exactly like *shape*. Without a grammar, other forms are accepted too:

    - Calls follow one of *markers*, such as "<tool_call>". If *is_bare*, calls that no text precedes need no marker.
    - A `BlockReader`, which the factory *block* creates, parses the calls.
    - One of *trailers*, such as "</tool_call>", may follow the calls, and is dropped.

    *special* lists the parts of calls that may be special tokens. Decoding must keep these tokens in the text.
    """

    name: str
    shape: CallShape
    block: BlockBegin
    markers: tuple[str, ...] = ()
    trailers: tuple[str, ...] = ()
    is_bare: bool = False
    special: tuple[str, ...] = ()
