"""CallSyntax: how one family of models writes calls, and how what it wrote is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class NotACall(ValueError):
    """What began like a call is none."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is read: the tool's name, and its arguments, the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Block:
    """One call or several that are written together, and where they end in the text."""

    end: int
    calls: Sequence[Call]


class BlockReader(Protocol):
    """Reads one block, in a text that grows."""

    def read(self, text: str) -> Block | None:
        """The block, once *text* has all of it, until then None. `NotACall` as soon as it is sure to be none."""


class BlockBegin(Protocol):
    """Makes the reader of a block."""

    def __call__(self, start: int) -> BlockReader:
        """The reader of the block that may begin at *start*."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """How the grammar has a family's calls written, character by character.

    An answer is *opening*, calls with the *separator* between them, *closing*; a call is *before*, the tool's name,
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
        """With which the first call begins."""
        return self.opening + self.before


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """What a family writes where it is free to: *markers* begin blocks, and one of the *trailers* may follow a block.

    A family that *is_bare* may also begin its answer with a block, without a marker. *special* are the texts of tokens
    that a tokenizer may call special, and leave out of a text, though they mean something here.
    """

    name: str
    shape: CallShape
    block: BlockBegin
    markers: tuple[str, ...] = ()
    trailers: tuple[str, ...] = ()
    is_bare: bool = False
    special: tuple[str, ...] = ()
