"""CallSyntax: how one family of models writes tool calls, and how such calls are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class NotACall(ValueError):
    """Error for a text that begins like a call but is not one."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call that was read: the tool's name, and the arguments as the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Block:
    """One or more calls that are written together, such as a JSON list, and the index in the text where they end."""

    end: int
    calls: Sequence[ParsedCall]


class BlockReader(Protocol):
    """A reader of one block in a growing text."""

    def read(self, text: str) -> Block | None:
        """Return the block, or None if its end has not arrived yet. Raise `NotACall` if *text* cannot be a block."""


class BlockBegin(Protocol):
    """A factory of block readers."""

    def __call__(self, start: int) -> BlockReader:
        """Return the reader of the block that may begin at index *start* of the text."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """The exact format of a family's calls, which a grammar enforces.

    The calls of an answer are written as *opening*, the calls with the *separator* between them, and *closing*. One
    call is written as *before*, the tool's name, *between*, the arguments, and *after*.
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
    """The way in which a family of models writes calls: exactly like *shape* with a grammar, more freely without one.

    Without a grammar, one of the *markers* begins a block of calls, which the reader from *block* reads. One of the
    *trailers* may follow the block. If *is_bare*, an answer may also begin with a block without a marker. *special* has
    the parts of calls that may be special tokens of the tokenizer, which would be dropped from decoded text.
    """

    name: str
    shape: CallShape
    block: BlockBegin
    markers: tuple[str, ...] = ()
    trailers: tuple[str, ...] = ()
    is_bare: bool = False
    special: tuple[str, ...] = ()
