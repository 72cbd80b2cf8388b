"""ChatReply: how `/v1/chat/completions` writes its answers."""

from collections.abc import Iterator, Sequence

from kvtier.engine.async_llm import Piece
from kvtier.engine.model.logprobs import TokenLogprobs
from kvtier.engine.scheduling.request import Completion
from kvtier.engine.server.api_error import ApiError
from kvtier.engine.server.event_stream import DONE, data_event
from kvtier.engine.server.generation_request import MOST_LOGPROBS, StreamOptions
from kvtier.engine.server.prompt_logprobs import prompt_logprobs
from kvtier.engine.server.reply import Answer, chunk_fields, envelope
from kvtier.engine.server.token_text import TokenText, finite
from kvtier.engine.server.usage import Usage

_PART_OF_A_CHARACTER = "\ufffd"


class ChatReply:
    """A `Reply`. The first chunk of a choice has the role, the next ones the text, the last one why it ended."""

    def __init__(self, model: str, text: TokenText, usage: Usage, tells_logprobs: bool, options: StreamOptions) -> None:
        self._head = envelope("chat.completion", "chatcmpl", model)
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        self._text = text
        self._usage = usage
        self._tells_logprobs = tells_logprobs
        self._options = options
        self._begun: set[int] = set()

    def whole(self, answers: Sequence[Answer]) -> dict[str, object]:
        choices = [
            {
                "index": answer.index,
                "message": {"role": "assistant", "content": answer.completion.text, "refusal": None},
                "logprobs": self._logprobs(answer.completion.logprobs),
                "finish_reason": answer.completion.finish_reason,
            }
            for answer in answers
        ]
        return {**self._head, "choices": choices, **self._scores(answers[0].completion), **self._used()}

    def events(self, index: int, piece: Piece) -> Iterator[bytes]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._event(index, {"role": "assistant", "content": ""})
        if piece.text or piece.logprobs:
            logprobs = self._logprobs([] if piece.logprobs is None else [piece.logprobs])
            yield self._event(index, {"content": piece.text}, logprobs)
        if piece.completion is not None:
            yield self._event(index, {}, finish_reason=piece.completion.finish_reason)

    def last_events(self) -> Iterator[bytes]:
        if self._options.include_usage:
            yield data_event({**self._chunk_head, "choices": [], **self._used()})
        yield DONE

    def error_event(self, error: ApiError) -> bytes:
        return data_event(error.content())

    def _scores(self, done: Completion) -> dict[str, object]:
        """What is told of the prompt's tokens, if that was asked for: then a completion has it."""
        scores, most = done.prompt_logprobs, MOST_LOGPROBS  # as many as were asked for were taken
        return {"prompt_logprobs": prompt_logprobs(scores, most, self._text)} if scores else {}

    def _used(self) -> dict[str, object]:
        return {"usage": self._usage.openai(), "kvtier": self._usage.kvtier()}

    def _event(
        self, index: int, delta: dict[str, str], logprobs: object = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        fields = chunk_fields(self._options, delta.get("content", ""), logprobs)
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
        token = self._text.of(token_id)
        content = None if _PART_OF_A_CHARACTER in token else list(token.encode())
        return {"token": token, "logprob": finite(logprob), "bytes": content}
