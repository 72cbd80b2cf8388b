"""The content blocks of an answer of `/v1/messages`: its text and its tool calls, whole or as events of a stream."""

import uuid
from collections.abc import Iterable, Iterator

import msgspec

from kvtier.server.answers import MessageBlock, MessageText, MessageToolUse
from kvtier.server.tool_calls.deltas import ArgumentsDelta, CallBegin, Delta, ReadAnswer, TextDelta
from kvtier.web.event_stream import named_event


class BlockStream:
    """A writer of the stream events for the content blocks of one answer. Owned by one reply.

    An answer without a tool call has a text block, even if the text is empty.
    """

    def __init__(self) -> None:
        self._num_blocks = 0  # blocks that have begun; the last one is still open
        self._is_text = False  # whether the open block is text
        self.has_calls = False

    def events(self, deltas: Iterable[Delta]) -> Iterator[bytes]:
        """Yield the events for *deltas*, the next parts of the answer."""
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    yield from self._open_text()
                    yield self._delta({"type": "text_delta", "text": text})
                case CallBegin(_, name):
                    yield from self._open(_use(name, {}))
                    self.has_calls, self._is_text = True, False
                case ArgumentsDelta(_, text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def last_events(self) -> Iterator[bytes]:
        """Yield the events that end the last block."""
        if not self._num_blocks:
            yield from self._open_text()
        yield typed_event("content_block_stop", index=self._num_blocks - 1)

    def _open_text(self) -> Iterator[bytes]:
        if not self._is_text:
            yield from self._open(MessageText(""))
            self._is_text = True

    def _open(self, block: MessageBlock) -> Iterator[bytes]:
        if self._num_blocks:
            yield typed_event("content_block_stop", index=self._num_blocks - 1)
        yield typed_event("content_block_start", index=self._num_blocks, content_block=block)
        self._num_blocks += 1

    def _delta(self, delta: dict[str, object]) -> bytes:
        return typed_event("content_block_delta", index=self._num_blocks - 1, delta=delta)


def whole_blocks(answer: ReadAnswer) -> list[MessageBlock]:
    """Return the content blocks of a whole answer.

    If the arguments of a tool call were cut off, they become an empty object, so that a client does not take them for
    complete.
    """
    calls: list[MessageBlock] = [_use(call.name, _input(call.arguments)) for call in answer.calls]
    return calls if calls and not answer.text else [MessageText(answer.text), *calls]


def typed_event(kind: str, **fields: object) -> bytes:
    """Return a stream event named *kind*. Its data is a JSON object with the type *kind* and the given *fields*."""
    return named_event(kind, {"type": kind, **fields})


def _use(name: str, arguments: object) -> MessageToolUse:
    return MessageToolUse(id=f"toolu_{uuid.uuid4().hex}", name=name, input=arguments)


def _input(arguments: str) -> object:
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
