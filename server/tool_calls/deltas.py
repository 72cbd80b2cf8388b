"""Deltas: what an answer grows by, text and calls of tools, in the order in which they are told."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The call of that number in the answer begins; it is of the tool *name*."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments of the call of that number, a text of JSON."""

    index: int
    text: str


Delta: TypeAlias = TextDelta | CallBegin | ArgumentsDelta


class Reader(Protocol):
    """Reads one answer, whose text comes in pieces. How it is cut into pieces makes no difference to what is told."""

    def push(self, text: str) -> list[Delta]:
        """What *text*, which goes on from before, makes sure."""

    def end(self) -> list[Delta]:
        """What is left, now that the answer has ended."""


class TextReader:
    """A `Reader` of an answer in which nothing is a call."""

    def push(self, text: str) -> list[Delta]:
        """The text as it is."""
        return [TextDelta(text)] if text else []

    def end(self) -> list[Delta]:
        """Nothing."""
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
        """Let the answer grow."""
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    self.text += text
                case CallBegin(_, name):
                    self.calls.append(Called(name))
                case ArgumentsDelta(index, text):
                    self.calls[index].arguments += text


def read_whole(reader: Reader, text: str) -> ReadAnswer:
    """The answer with this *text*, which *reader* has read nothing of."""
    answer = ReadAnswer()
    answer.add(reader.push(text))
    answer.add(reader.end())
    return answer
