"""ItemStream: the output items of one answer of the Responses API, whole or as events of a stream."""

import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec
from msgspec import UNSET

from kvtier.server.responses.response_object import (
    AnswerCall,
    AnswerCustomCall,
    AnswerItem,
    AnswerMessage,
    AnswerText,
    ItemStatus,
)
from kvtier.server.responses.tools import CUSTOM_INPUT, CustomTool, NamedTool
from kvtier.server.tool_calls.deltas import ArgumentsDelta, CallBegin, Delta, TextDelta

Event: TypeAlias = tuple[str, dict[str, object]]  # type and fields of an event, without its sequence number


class ItemStream:
    """The output items of one answer, and the events that tell of them. Owned by one reply.

    Text becomes a message, and each tool call becomes an item of its own. An answer without a tool call has a message,
    even if its text is empty.
    """

    def __init__(self, tools: Mapping[str, NamedTool]) -> None:
        """Create a stream without items. *tools* has the request's tools by the names that the model sees."""
        self.output: list[AnswerItem] = []  # items that have ended
        self._tools = tools
        self._open: AnswerItem | None = None
        self._text = ""  # of the open item: the text of a message, or the arguments of a call

    def events(self, deltas: Iterable[Delta]) -> Iterator[Event]:
        """Yield the events for *deltas*, the next parts of the answer."""
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    yield from self._open_message()
                    yield from self._text_delta(text)
                case CallBegin(_, name):
                    yield from self._begin(_call(name, self._tools.get(name)))
                case ArgumentsDelta(_, text):
                    yield from self._arguments_delta(text)

    def last_events(self, *, is_cut_off: bool) -> Iterator[Event]:
        """Yield the events that end the last item. If *is_cut_off*, the item is incomplete."""
        if self._open is None:
            yield from self._open_message()
        yield from self._end("incomplete" if is_cut_off else "completed")

    def _open_message(self) -> Iterator[Event]:
        if not isinstance(self._open, AnswerMessage):
            message = AnswerMessage(f"msg_{uuid.uuid4().hex}", "in_progress", [])
            yield from self._begin(message)
            yield "response.content_part.added", {**self._place(message), "content_index": 0, "part": AnswerText("")}

    def _begin(self, item: AnswerItem) -> Iterator[Event]:
        yield from self._end("completed")
        self._open, self._text = item, ""
        yield "response.output_item.added", {"output_index": len(self.output), "item": item}

    def _text_delta(self, text: str) -> Iterator[Event]:
        assert self._open is not None, "_open_message opens an item"
        self._text += text
        fields = {**self._place(self._open), "content_index": 0, "delta": text, "logprobs": []}
        yield "response.output_text.delta", fields

    def _arguments_delta(self, text: str) -> Iterator[Event]:
        self._text += text
        if isinstance(self._open, AnswerCall):  # a custom call is told as a whole, when its arguments are complete
            yield "response.function_call_arguments.delta", {**self._place(self._open), "delta": text}

    def _end(self, status: ItemStatus) -> Iterator[Event]:
        """Yield the events that end the open item, if there is one."""
        if (item := self._open) is None:
            return
        place = self._place(item)
        match item:
            case AnswerMessage():
                part = AnswerText(self._text)
                yield "response.output_text.done", {**place, "content_index": 0, "text": self._text, "logprobs": []}
                yield "response.content_part.done", {**place, "content_index": 0, "part": part}
                item = msgspec.structs.replace(item, status=status, content=[part])
            case AnswerCall():
                yield "response.function_call_arguments.done", {**place, "name": item.name, "arguments": self._text}
                item = msgspec.structs.replace(item, status=status, arguments=self._text)
            case AnswerCustomCall():
                given = _custom_input(self._text)
                yield "response.custom_tool_call_input.delta", {**place, "delta": given}
                yield "response.custom_tool_call_input.done", {**place, "input": given}
                item = msgspec.structs.replace(item, status=status, input=given)
        yield "response.output_item.done", {"output_index": len(self.output), "item": item}
        self.output.append(item)
        self._open = None

    def _place(self, item: AnswerItem) -> dict[str, object]:
        return {"item_id": item.id, "output_index": len(self.output)}


def _call(full_name: str, named: NamedTool | None) -> AnswerCall | AnswerCustomCall:
    """Return an empty call of the tool that the model has named; None for *named*: no tool of the request."""
    name = full_name if named is None else named.tool.name
    namespace = (None if named is None else named.namespace) or UNSET
    call_id = f"call_{uuid.uuid4().hex}"
    if named is not None and isinstance(named.tool, CustomTool):
        return AnswerCustomCall(f"ctc_{uuid.uuid4().hex}", "in_progress", call_id, name, "", namespace)
    return AnswerCall(f"fc_{uuid.uuid4().hex}", "in_progress", call_id, name, "", namespace)


def _custom_input(arguments: str) -> str:
    """Return the input of a custom tool from the *arguments* that the model wrote, which may be cut off."""
    try:
        read = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    given = read.get(CUSTOM_INPUT) if isinstance(read, dict) else None
    return given if isinstance(given, str) else arguments
