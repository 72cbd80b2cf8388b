"""MessageReply: writes the answers of `/v1/messages`."""

import uuid
from collections.abc import Iterator, Sequence

import msgspec

from kvtier.engine.async_engine import StreamChunk
from kvtier.engine.scheduling.request import Completion, FinishReason
from kvtier.server.answers import MessageAnswer, MessageStart, MessageUsage
from kvtier.server.anthropic.answer_blocks import BlockStream, typed_event, whole_blocks
from kvtier.server.cache_usage import CacheUsage
from kvtier.server.documents.kept_prefixes import Keeping
from kvtier.server.reply import Answer
from kvtier.server.tool_calls.deltas import read_whole
from kvtier.server.tool_calls.tool_use import ToolUse
from kvtier.server.usage import Usage
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.web.api_error import ApiError
from kvtier.web.error_response import error_object
from kvtier.web.event_stream import named_event


class _Ending(msgspec.Struct, frozen=True):
    """The reason why an answer has ended, in Anthropic's terms."""

    stop_reason: str
    stop_sequence: str | None = None


class MessageReply:
    """A `Reply` in the format of `/v1/messages`, which has one choice.

    In a stream, the first event has the token counts of the prompt. The counts of the answer follow at the end.
    """

    def __init__(self, model: str, usage: Usage, tools: ToolUse, request_id: str, is_warmup: bool) -> None:
        """Create a reply. If *is_warmup*, its content is empty, because the request only computes the prompt."""
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._usage = usage
        self._request_id = request_id
        self._only_warms = is_warmup
        self._has_begun = False
        self._tools = tools
        self._reader = tools.reader()  # for a stream
        self._blocks = BlockStream()

    def whole(self, answers: Sequence[Answer]) -> MessageAnswer:
        (answer,) = answers
        done = answer.completion
        read = read_whole(self._tools.reader(), done.text)
        ending = _ending(done, has_calls=bool(read.calls))
        return MessageAnswer(
            id=self._id,
            type="message",
            role="assistant",
            model=self._model,
            content=[] if self._only_warms else whole_blocks(read),
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            usage=self._usage_of(done.tokens, self._num_told(done)),
            kvtier=self._usage.kvtier(),
        )

    def events(self, index: int, piece: StreamChunk) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield self._beginning(piece)
        done = piece.completion
        if not self._only_warms:
            deltas = [*self._reader.push(piece.text), *([] if done is None else self._reader.end())]
            yield from self._blocks.events(deltas)
            if done is not None:
                yield from self._blocks.last_events()
        if done is not None:
            usage = self._usage_of(done.tokens, self._num_told(done))
            ending = _ending(done, has_calls=self._blocks.has_calls)
            yield typed_event("message_delta", delta=ending, usage=usage, kvtier=self._usage.kvtier())

    def last_events(self) -> Iterator[bytes]:
        yield typed_event("message_stop")

    def error_event(self, error: ApiError) -> bytes:
        return named_event("error", error_object(error, self._request_id))

    def _beginning(self, piece: StreamChunk) -> bytes:
        message = MessageStart(
            id=self._id,
            type="message",
            role="assistant",
            model=self._model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self._usage_of(piece.tokens, 0),
        )
        return typed_event("message_start", message=message)

    def _usage_of(self, tokens: TokenBalance, num_output: int) -> MessageUsage:
        return CacheUsage.of(tokens, self._usage.kept or Keeping()).anthropic(num_output)

    def _num_told(self, completion: Completion) -> int:
        return 0 if self._only_warms else len(completion.token_ids)


def _ending(completion: Completion, *, has_calls: bool) -> _Ending:
    if completion.finish_reason is FinishReason.LENGTH:
        return _Ending("max_tokens")
    if completion.stop is not None:
        return _Ending("stop_sequence", completion.stop)
    return _Ending("tool_use" if has_calls else "end_turn")
