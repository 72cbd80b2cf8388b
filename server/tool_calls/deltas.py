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
    """A parser of one answer that arrives in pieces. The result does not depend on how the answer is divided."""

    def push(self, text: str) -> list[Delta]:
        """Parse the answer's next piece *text*, and return the deltas that no later piece can change."""

    def end(self) -> list[Delta]:
        """Return the remaining deltas, now that the answer has ended."""


class TextReader:
    """A `Reader` that reports a whole answer as text, for requests without tools."""

    def push(self, text: str) -> list[Delta]:
        return [TextDelta(text)] if text else []

    def end(self) -> list[Delta]:
        return []


@dataclass(slots=True)
class Called:
    """A tool call of a complete answer. The arguments are JSON text."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ReadAnswer:
    """The text and the tool calls of a complete answer."""

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
    """Parse the complete answer *text*. *reader* must not have been used before."""
    answer = ReadAnswer()
    answer.add(reader.push(text))
    answer.add(reader.end())
    return answer
