"""ChatReply: writes the answers of `/v1/chat/completions`."""

import uuid
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from kvtier.engine.async_engine import StreamChunk
from kvtier.engine.model.logprobs import TokenLogprobs
from kvtier.engine.scheduling.request import Completion, FinishReason
from kvtier.server.answers import (
    ChatAnswer,
    ChatChoice,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    PromptLogprobs,
    ToolCall,
    ToolCallFunction,
)
from kvtier.server.generation_request import MAX_LOGPROBS, StreamOptions
from kvtier.server.reply import Answer, CountedTokens, Envelope, chunk_fields
from kvtier.server.token_text import TokenText, finite, prompt_logprobs
from kvtier.server.tool_calls.deltas import ArgumentsDelta, CallBegin, Delta, Reader, TextDelta, read_whole
from kvtier.server.tool_calls.tool_use import ToolUse
from kvtier.server.usage import Usage
from kvtier.web.api_error import ApiError
from kvtier.web.event_stream import DONE, data_event


class ChatReply:
    """A `Reply` in the format of `/v1/chat/completions`.

    In a stream, the first chunk of a choice has the role. The next chunks have its text and tool calls, and the last
    chunk has the finish reason.
    """

    def __init__(
        self,
        model: str,
        text: TokenText,
        usage: Usage,
        tools: ToolUse,
        tells_logprobs: bool,
        options: StreamOptions,
    ) -> None:
        self._envelope = Envelope.new("chatcmpl", model)
        self._text = text
        self._usage = usage
        self._tools = tools
        self._tells_logprobs = tells_logprobs
        self._options = options
        self._readers: dict[int, Reader] = {}  # by index of a choice that has begun
        self._calling: set[int] = set()  # indexes of choices with a tool call
        self._counted = CountedTokens()

    def whole(self, answers: Sequence[Answer]) -> ChatAnswer:
        return ChatAnswer(
            id=self._envelope.id,
            object="chat.completion",
            created=self._envelope.created,
            model=self._envelope.model,
            choices=[self._whole_choice(answer) for answer in answers],
            prompt_logprobs=self._scores(answers[0].completion),
            usage=self._usage.openai(),
            kvtier=self._usage.kvtier(),
        )

    def events(self, index: int, piece: StreamChunk) -> Iterator[bytes]:
        if index not in self._readers:
            self._readers[index] = self._tools.reader()
            self._counted.begin(index, piece)
            yield self._event(index, {"role": "assistant", "content": ""})
        self._counted.add(index, piece)
        logprobs = self._logprobs([piece.logprobs]) if piece.logprobs else None
        for delta in self._read(index, piece):
            yield self._event(index, self._written(index, delta), logprobs)
            logprobs = None  # a piece has one set of log probabilities, which is sent once
        if logprobs is not None:
            yield self._event(index, {"content": ""}, logprobs)
        if piece.completion is not None:
            reason = finish_reason(piece.completion, has_calls=index in self._calling)
            yield self._event(index, {}, finish_reason=reason)

    def last_events(self) -> Iterator[bytes]:
        if self._options.include_usage:
            used = {"usage": self._usage.openai(), "kvtier": self._usage.kvtier()}
            yield self._envelope.chunk("chat.completion.chunk", [], used)
        yield DONE

    def error_event(self, error: ApiError) -> bytes:
        return data_event(error.content())

    def _scores(self, done: Completion) -> PromptLogprobs | UnsetType:
        """Return the log probabilities of the prompt's tokens, or UNSET if the request does not ask for them."""
        scores, limit = done.prompt_logprobs, MAX_LOGPROBS  # each score has only as many tokens as the request asks for
        return prompt_logprobs(scores, limit, self._text) if scores else UNSET

    def _whole_choice(self, answer: Answer) -> ChatChoice:
        read = read_whole(self._tools.reader(), answer.completion.text)
        calls = [_call(call.name, call.arguments) for call in read.calls]
        return ChatChoice(
            index=answer.index,
            message=ChatMessage(
                role="assistant",
                content=(read.text or None) if calls else read.text,
                refusal=None,
                tool_calls=calls or UNSET,
            ),
            logprobs=self._logprobs(answer.completion.logprobs),
            finish_reason=finish_reason(answer.completion, has_calls=bool(calls)),
        )

    def _read(self, index: int, piece: StreamChunk) -> list[Delta]:
        reader = self._readers[index]
        return [*reader.push(piece.text), *([] if piece.completion is None else reader.end())]

    def _written(self, index: int, delta: Delta) -> dict[str, object]:
        """Return *delta* in OpenAI's format, for the field `delta` of a chunk."""
        match delta:
            case TextDelta(text):
                return {"content": text}
            case CallBegin(number, name):
                self._calling.add(index)
                return {"tool_calls": [{"index": number, **msgspec.structs.asdict(_call(name, ""))}]}
            case ArgumentsDelta(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}

    def _event(
        self,
        index: int,
        delta: Mapping[str, object],
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        varying = delta.get("tool_calls", delta.get("content", ""))
        fields = chunk_fields(self._options, varying, logprobs, self._counted.usage(index))
        return self._envelope.chunk("chat.completion.chunk", [choice], fields)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._tells_logprobs:
            return None
        content = [
            ChatLogprob(
                token=self._text.of(item.token_id),
                logprob=finite(item.logprob),
                bytes=self._bytes_of(item.token_id),
                top_logprobs=[self._token(*pair) for pair in item.top],
            )
            for item in logprobs
        ]
        return ChatLogprobs(content=content, refusal=None)

    def _token(self, token_id: int, logprob: float) -> ChatTokenLogprob:
        return ChatTokenLogprob(token=self._text.of(token_id), logprob=finite(logprob), bytes=self._bytes_of(token_id))

    def _bytes_of(self, token_id: int) -> list[int] | None:
        content = self._text.bytes_of(token_id)
        return None if content is None else list(content)


def finish_reason(completion: Completion, *, has_calls: bool) -> str:
    """Return the finish reason of a choice in OpenAI's terms."""
    is_stopped = completion.finish_reason is FinishReason.STOP
    return "tool_calls" if has_calls and is_stopped else str(completion.finish_reason)


def _call(name: str, arguments: str) -> ToolCall:
    """Return a tool call with a new unique id."""
    function = ToolCallFunction(name=name, arguments=arguments)
    return ToolCall(id=f"call_{uuid.uuid4().hex}", type="function", function=function)
