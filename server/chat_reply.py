"""ChatReply: how `/v1/chat/completions` writes its answers."""

import uuid
from collections.abc import Iterator, Mapping, Sequence

from kvtier.engine.async_llm import StreamChunk
from kvtier.engine.model.logprobs import TokenLogprobs
from kvtier.engine.scheduling.request import Completion, FinishReason
from kvtier.server.generation_request import MAX_LOGPROBS, StreamOptions
from kvtier.server.reply import Answer, CountedTokens, chunk_fields, envelope
from kvtier.server.token_text import TokenText, finite, prompt_logprobs
from kvtier.server.tool_calls.deltas import ArgumentsDelta, CallBegin, Delta, Reader, TextDelta, read_whole
from kvtier.server.tool_calls.tool_use import ToolUse
from kvtier.server.usage import Usage
from kvtier.web.api_error import ApiError
from kvtier.web.event_stream import DONE, data_event


class ChatReply:
    """A `Reply`. A choice's first chunk has the role, the next ones text and calls, the last one the finish reason."""

    def __init__(
        self,
        model: str,
        text: TokenText,
        usage: Usage,
        tools: ToolUse,
        tells_logprobs: bool,
        options: StreamOptions,
    ) -> None:
        self._head = envelope("chat.completion", "chatcmpl", model)
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        self._text = text
        self._usage = usage
        self._tools = tools
        self._tells_logprobs = tells_logprobs
        self._options = options
        self._readers: dict[int, Reader] = {}  # of choices that have begun
        self._calling: set[int] = set()  # choices with a call
        self._counted = CountedTokens()

    def whole(self, answers: Sequence[Answer]) -> dict[str, object]:
        choices = [self._whole_choice(answer) for answer in answers]
        return {**self._head, "choices": choices, **self._scores(answers[0].completion), **self._used()}

    def events(self, index: int, piece: StreamChunk) -> Iterator[bytes]:
        if index not in self._readers:
            self._readers[index] = self._tools.reader()
            self._counted.begin(index, piece)
            yield self._event(index, {"role": "assistant", "content": ""})
        self._counted.add(index, piece)
        logprobs = self._logprobs([piece.logprobs]) if piece.logprobs else None
        for delta in self._read(index, piece):
            yield self._event(index, self._written(index, delta), logprobs)
            logprobs = None  # they belong to the piece, so they are sent once
        if logprobs is not None:
            yield self._event(index, {"content": ""}, logprobs)
        if piece.completion is not None:
            reason = finish_reason(piece.completion, has_calls=index in self._calling)
            yield self._event(index, {}, finish_reason=reason)

    def last_events(self) -> Iterator[bytes]:
        if self._options.include_usage:
            yield data_event({**self._chunk_head, "choices": [], **self._used()})
        yield DONE

    def error_event(self, error: ApiError) -> bytes:
        return data_event(error.content())

    def _scores(self, done: Completion) -> dict[str, object]:
        """Return the log probabilities of the prompt's tokens, which a completion has if asked for."""
        scores, limit = done.prompt_logprobs, MAX_LOGPROBS  # the completion has only as many as were asked for
        return {"prompt_logprobs": prompt_logprobs(scores, limit, self._text)} if scores else {}

    def _used(self) -> dict[str, object]:
        return {"usage": self._usage.openai(), "kvtier": self._usage.kvtier()}

    def _whole_choice(self, answer: Answer) -> dict[str, object]:
        read = read_whole(self._tools.reader(), answer.completion.text)
        message: dict[str, object] = {"role": "assistant", "content": read.text, "refusal": None}
        if read.calls:
            calls = [_call(call.name, call.arguments) for call in read.calls]
            message |= {"content": read.text or None, "tool_calls": calls}
        return {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer.completion.logprobs),
            "finish_reason": finish_reason(answer.completion, has_calls=bool(read.calls)),
        }

    def _read(self, index: int, piece: StreamChunk) -> list[Delta]:
        reader = self._readers[index]
        return [*reader.push(piece.text), *([] if piece.completion is None else reader.end())]

    def _written(self, index: int, delta: Delta) -> dict[str, object]:
        """Return the `delta` of a chunk."""
        match delta:
            case TextDelta(text):
                return {"content": text}
            case CallBegin(number, name):
                self._calling.add(index)
                return {"tool_calls": [{"index": number, **_call(name, "")}]}
            case ArgumentsDelta(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}

    def _event(
        self, index: int, delta: Mapping[str, object], logprobs: object = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        varying = delta.get("tool_calls", delta.get("content", ""))
        fields = chunk_fields(self._options, varying, logprobs, self._counted.usage(index))
        return data_event({**self._chunk_head, "choices": [choice], **fields})

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, object] | None:
        if not self._tells_logprobs:
            return None
        content = [
            {**self._token(item.token_id, item.logprob), "top_logprobs": [self._token(*pair) for pair in item.top]}
            for item in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, object]:
        content = self._text.bytes_of(token_id)
        told = None if content is None else list(content)
        return {"token": self._text.of(token_id), "logprob": finite(logprob), "bytes": told}


def finish_reason(completion: Completion, *, has_calls: bool) -> str:
    """Return OpenAI's finish reason of a choice."""
    is_stopped = completion.finish_reason is FinishReason.STOP
    return "tool_calls" if has_calls and is_stopped else str(completion.finish_reason)


def _call(name: str, arguments: str) -> dict[str, object]:
    """Return a call with a unique id."""
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": arguments}}
