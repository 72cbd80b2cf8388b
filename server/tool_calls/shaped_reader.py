"""ShapedReader: parses an answer in which a grammar enforced the call format, and reports calls while they arrive."""

from enum import Enum, auto

from kvtier.engine.text.detokenizer import num_begun
from kvtier.server.tool_calls.call_syntax import CallShape
from kvtier.server.tool_calls.deltas import ArgumentsDelta, CallBegin, Delta, TextDelta
from kvtier.server.tool_calls.json_extent import JsonExtent


class _In(Enum):
    TEXT = auto()
    NAME = auto()
    ARGUMENTS = auto()
    GAP = auto()


class ShapedReader:
    """A `Reader` of answers whose tool calls have exactly the format *shape*. Each answer needs a new reader.

    If an answer is cut off, the arguments of its last call may be incomplete.
    """

    def __init__(self, shape: CallShape, trigger: str = "") -> None:
        """Create a reader.

        *trigger* is text with which the first tool call begins, such as "<tool_call>". Once the model has written it,
        the grammar enforces the rest of the call. If *trigger* is empty, it enforces a call in any case.
        """
        self._shape = shape
        self._trigger = trigger
        self._held = ""
        self._place = _In.TEXT
        self._num_begun = 0  # calls whose beginning was reported
        self._extent = JsonExtent(0)  # of the arguments in the held text
        self._num_told = 0  # reported characters of the arguments
        self._deltas: list[Delta] = []

    def push(self, text: str) -> list[Delta]:
        self._held += text
        self._deltas = []
        reading = {_In.TEXT: self._text, _In.NAME: self._name, _In.ARGUMENTS: self._arguments, _In.GAP: self._gap}
        while reading[self._place]():
            pass
        return self._deltas

    def end(self) -> list[Delta]:
        """Return the remaining text, unless it is the beginning of a call that was cut off."""
        begun = self._held.lstrip()
        is_call = begun.startswith(self._trigger)
        is_text = self._place is _In.TEXT and self._held != "" and not is_call
        return [TextDelta(self._held)] if is_text else []

    def _text(self) -> bool:
        text, marker, rest = self._held.partition(self._shape.marker)
        if not marker:
            text = text[: len(text) - num_begun(text, [self._shape.marker])]
            rest = self._held[len(text.rstrip()) :]
        if text.rstrip():  # white space right before the call is dropped
            self._deltas.append(TextDelta(text.rstrip()))
        self._held = rest
        self._place = _In.NAME if marker else _In.TEXT
        return marker != ""

    def _name(self) -> bool:
        name, between, rest = self._held.partition(self._shape.between)
        if not between:
            return False
        self._deltas.append(CallBegin(self._num_begun, name))
        self._num_begun += 1
        self._held, self._extent, self._num_told = rest, JsonExtent(0), 0
        self._place = _In.ARGUMENTS
        return True

    def _arguments(self) -> bool:
        end = self._extent.end_in(self._held)
        if piece := self._held[self._num_told : end]:
            self._deltas.append(ArgumentsDelta(self._num_begun - 1, piece))
        self._num_told += len(piece)
        if end is None:
            return False
        self._held, self._place = self._held[end:], _In.GAP
        return True

    def _gap(self) -> bool:
        # Skip the separator between two tool calls, and the text before the next tool's name.
        _, before, rest = self._held.partition(self._shape.before)
        if not before:
            return False
        self._held, self._place = rest, _In.NAME
        return True
