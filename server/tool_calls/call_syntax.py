"""CallSyntax: how one family of models writes tool calls, and how they are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class NotACall(ValueError):
    """Error for a text that begins like a call but is not one."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call that was read: the tool's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Block:
    """One or more calls that are written together, and where they end in the text."""

    end: int
    calls: Sequence[ParsedCall]


class BlockReader(Protocol):
    """A reader of one block in a growing text."""

    def read(self, text: str) -> Block | None:
        """Return the block once *text* has all of it, else None; raise `NotACall` once it cannot be one."""


class BlockBegin(Protocol):
    """A factory of block readers."""

    def __call__(self, start: int) -> BlockReader:
        """Return the reader of the block that may begin at *start*."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """The exact text of a family's calls that the grammar enforces.

    An answer is *opening*, calls with the *separator* between them, *closing*. A call is *before*, the tool's name,
    *between*, the arguments, *after*.
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
    """The format of a family's calls without a grammar.

    *markers* begin blocks, and one of the *trailers* may follow a block. A family that *is_bare* may also begin its
    answer with a block, without a marker. *special* are the texts of tokens that a tokenizer may treat as special and
    drop from decoded text, although they are a part of calls.
    """

    name: str
    shape: CallShape
    block: BlockBegin
    markers: tuple[str, ...] = ()
    trailers: tuple[str, ...] = ()
    is_bare: bool = False
    special: tuple[str, ...] = ()
