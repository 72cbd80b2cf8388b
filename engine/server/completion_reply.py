"""CompletionReply: how `/v1/completions` writes its answers."""

from collections import Counter
from collections.abc import Iterator, Sequence

from kvtier.engine.async_llm import Piece
from kvtier.engine.model.logprobs import TokenLogprobs
from kvtier.engine.server.api_error import ApiError
from kvtier.engine.server.event_stream import DONE, data_event
from kvtier.engine.server.generation_request import StreamOptions
from kvtier.engine.server.reply import Answer, chunk_fields, envelope
from kvtier.engine.server.token_text import TokenText, finite
from kvtier.engine.server.usage import Usage


class CompletionReply:
    """A `Reply` whose chunks have the same form as the whole answer."""

    def __init__(self, model: str, text: TokenText, usage: Usage, tells_logprobs: bool, options: StreamOptions) -> None:
        self._head = envelope("text_completion", "cmpl", model)
        self._text = text
        self._usage = usage
        self._tells_logprobs = tells_logprobs
        self._options = options
        self._offsets: Counter[int] = Counter()  # characters of each choice's tokens so far

    def whole(self, answers: Sequence[Answer]) -> dict[str, object]:
        choices = [
            self._choice(
                answer.index, answer.completion.text, answer.completion.logprobs, answer.completion.finish_reason
            )
            for answer in answers
        ]
        return {**self._head, "choices": choices, **self._used()}

    def events(self, index: int, piece: Piece) -> Iterator[bytes]:
        if piece.text or piece.logprobs or piece.completion:
            logprobs = [] if piece.logprobs is None else [piece.logprobs]
            finish_reason = None if piece.completion is None else piece.completion.finish_reason
            choice = self._choice(index, piece.text, logprobs, finish_reason)
            fields = chunk_fields(self._options, piece.text, choice["logprobs"])
            yield data_event({**self._head, "choices": [choice], **fields})

    def last_events(self) -> Iterator[bytes]:
        if self._options.include_usage:
            yield data_event({**self._head, "choices": [], **self._used()})
        yield DONE

    def error_event(self, error: ApiError) -> bytes:
        return data_event(error.content())

    def _used(self) -> dict[str, object]:
        return {"usage": self._usage.openai(), "kvtier": self._usage.kvtier()}

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprobs], finish_reason: str | None
    ) -> dict[str, object]:
        told = self._logprobs(index, logprobs) if self._tells_logprobs else None
        return {"index": index, "text": text, "logprobs": told, "finish_reason": finish_reason}

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, object]:
        tokens = [self._text.of(item.token_id) for item in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        top = [  # the chosen token too, likely or not
            {
                self._text.of(token_id): finite(logprob)
                for token_id, logprob in (*item.top, (item.token_id, item.logprob))
            }
            for item in logprobs
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [finite(item.logprob) for item in logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }
