"""CompletionReply: writes the answers of `/v1/completions`, whole or as a stream of chunks."""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from kvtier.engine.async_engine import StreamChunk
from kvtier.engine.model.logprobs import TokenLogprobs
from kvtier.engine.scheduling.request import Completion
from kvtier.server.answers import CompletionAnswer, CompletionChoice, CompletionLogprobs
from kvtier.server.completion_request import CompletionRequest
from kvtier.server.prompt import Prompt
from kvtier.server.reply import Answer, CountedTokens, Envelope, chunk_fields
from kvtier.server.token_text import TokenText, finite, prompt_logprobs
from kvtier.server.usage import Usage
from kvtier.web.api_error import ApiError
from kvtier.web.event_stream import DONE, data_event

_Scored = Sequence[tuple[int, TokenLogprobs | None]]  # token ids with their log probabilities


class CompletionReply:
    """A writer of one answer of `/v1/completions`. With *echo*, the prompt precedes the text of each choice."""

    def __init__(self, asked: CompletionRequest, prompts: Sequence[Prompt], text: TokenText, usage: Usage) -> None:
        self._envelope = Envelope.new("cmpl", asked.model)
        self._asked = asked
        self._prompts = prompts
        self._text = text
        self._usage = usage
        self._options = asked.chunk_options
        self._offsets: Counter[int] = Counter()  # characters of each choice's tokens so far
        self._begun: set[int] = set()
        self._counted = CountedTokens()

    def whole(self, answers: Sequence[Answer]) -> CompletionAnswer:
        return CompletionAnswer(
            id=self._envelope.id,
            object="text_completion",
            created=self._envelope.created,
            model=self._envelope.model,
            choices=[self._whole_choice(answer.index, answer.completion) for answer in answers],
            usage=self._usage.openai(),
            kvtier=self._usage.kvtier(),
        )

    def events(self, index: int, piece: StreamChunk) -> Iterator[bytes]:
        self._counted.begin(index, piece)
        self._counted.add(index, piece)
        echoes = self._asked.echo and index not in self._begun
        if piece.text or piece.logprobs or piece.completion or echoes:
            logprobs = [] if piece.logprobs is None else [piece.logprobs]
            finish_reason = None if piece.completion is None else piece.completion.finish_reason
            choice = self._choice(index, piece.text, logprobs, finish_reason, piece.prompt_logprobs)
            fields = chunk_fields(self._options, choice.text, choice.logprobs, self._counted.usage(index))
            yield self._envelope.chunk("text_completion", [choice], fields)

    def last_events(self) -> Iterator[bytes]:
        if self._options.include_usage:
            used = {"usage": self._usage.openai(), "kvtier": self._usage.kvtier()}
            yield self._envelope.chunk("text_completion", [], used)
        yield DONE

    def error_event(self, error: ApiError) -> bytes:
        return data_event(error.content())

    def _whole_choice(self, index: int, done: Completion) -> CompletionChoice:
        choice = self._choice(index, done.text, done.logprobs, done.finish_reason, done.prompt_logprobs)
        if (num_top := self._asked.prompt_logprobs) is None:
            return choice
        scores = prompt_logprobs(done.prompt_logprobs, num_top, self._text)
        return msgspec.structs.replace(choice, prompt_logprobs=scores)

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprobs],
        finish_reason: str | None,
        of_prompt: Sequence[TokenLogprobs | None],
    ) -> CompletionChoice:
        """Return a whole choice or, in a stream, the next piece of a choice.

        If the request sets *echo*, the prompt precedes the choice's text. *of_prompt* has the log probabilities of the
        prompt's tokens.
        """
        scored: list[tuple[int, TokenLogprobs | None]] = [(item.token_id, item) for item in logprobs]
        if self._asked.echo and index not in self._begun:
            self._begun.add(index)
            prompt = self._prompts[index // self._asked.n]
            text = self._text.of_prompt(prompt) + text
            scored = [*zip(prompt.token_ids, of_prompt, strict=False), *scored]
        told = None if self._asked.logprobs is None else self._logprobs(index, scored, self._asked.logprobs)
        return CompletionChoice(index=index, text=text, logprobs=told, finish_reason=finish_reason)

    def _logprobs(self, index: int, scored: _Scored, num_top: int) -> CompletionLogprobs:
        offsets = []
        for token_id, _ in scored:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(self._text.of(token_id))
        items = [item for _, item in scored]
        return CompletionLogprobs(
            tokens=[self._text.name_of(token_id) for token_id, _ in scored],
            token_logprobs=[None if item is None else finite(item.logprob) for item in items],
            top_logprobs=[None if item is None else self._likeliest(item, num_top) for item in items],
            text_offset=offsets,
        )

    def _likeliest(self, item: TokenLogprobs, num_top: int) -> dict[str, float]:
        pairs = (*item.top[:num_top], (item.token_id, item.logprob))  # including the token itself, however unlikely
        return {self._text.name_of(token_id): finite(logprob) for token_id, logprob in pairs}
