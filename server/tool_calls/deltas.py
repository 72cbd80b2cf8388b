"""Deltas: the pieces of text and of tool calls by which an answer grows, in the order in which they are sent."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of the answer's call number *index*, which calls the tool *name*."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The next piece of the arguments of call number *index*. All pieces together are JSON text."""

    index: int
    text: str


Delta: TypeAlias = TextDelta | CallBegin | ArgumentsDelta


class Reader(Protocol):
    """A reader of one answer that arrives in pieces. What it reads does not depend on how the answer is cut."""

    def push(self, text: str) -> list[Delta]:
        """Read *text*, the answer's next piece, and return the deltas that are now certain."""

    def end(self) -> list[Delta]:
        """Return the remaining deltas, now that the answer has ended."""


class TextReader:
    """A `Reader` of an answer without calls."""

    def push(self, text: str) -> list[Delta]:
        return [TextDelta(text)] if text else []

    def end(self) -> list[Delta]:
        return []


@dataclass(slots=True)
class Called:
    """One call of a whole answer."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ReadAnswer:
    """A whole answer."""

    text: str = ""
    calls: list[Called] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> None:
        """Append *deltas* to the answer."""
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    self.text += text
                case CallBegin(_, name):
                    self.calls.append(Called(name))
                case ArgumentsDelta(index, text):
                    self.calls[index].arguments += text


def read_whole(reader: Reader, text: str) -> ReadAnswer:
    """Return the answer with this *text*; *reader* must be new."""
    answer = ReadAnswer()
    answer.add(reader.push(text))
    answer.add(reader.end())
    return answer
