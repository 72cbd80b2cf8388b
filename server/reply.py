"""Reply: the interface for writing the answer to one request in an endpoint's format, whole or as a stream."""

import secrets
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvtier.engine.async_engine import StreamChunk
from kvtier.engine.scheduling.request import Completion
from kvtier.server.generation_request import StreamOptions
from kvtier.web.api_error import ApiError
from kvtier.web.event_stream import data_event

PADDED_BYTES = 32  # a token has up to about 20 bytes, so the chunks of nearly all tokens have the same size


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished choice of an answer that is not streamed. *index* is its position in the answer's `choices`."""

    index: int
    completion: Completion


class Reply(Protocol):
    """A writer of one answer in the format of its endpoint. Owned by one request."""

    def whole(self, answers: Sequence[Answer]) -> msgspec.Struct:
        """Return the whole answer, for a request without a stream."""

    def events(self, index: int, piece: StreamChunk) -> Iterator[bytes]:
        """Yield the events that send a *piece* of the choice at *index*. There are none if the piece is empty."""

    def last_events(self) -> Iterator[bytes]:
        """Yield the events at the end of a stream."""

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream with *error*."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that OpenAI's format has in every answer, and in every chunk of a streamed answer."""

    id: str
    created: int  # seconds since 1970
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> "Envelope":
        """Return an envelope with the current time and a new id that begins with *prefix*."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)

    def chunk(self, kind: str, choices: Sequence[object], fields: Mapping[str, object]) -> bytes:
        """Return a chunk of a streamed answer as an event. *kind* is its `object`, *fields* are further fields."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return data_event({**head, "choices": choices, **fields})


class CountedTokens:
    """A counter of the tokens so far in each choice of a stream. Owned by one reply."""

    def __init__(self) -> None:
        self._num_prompt: dict[int, int] = {}
        self._num_generated: Counter[int] = Counter()

    def begin(self, index: int, piece: StreamChunk) -> None:
        """Record the length of the choice's prompt, which every *piece* of the choice repeats."""
        self._num_prompt[index] = piece.tokens.num_tokens

    def add(self, index: int, piece: StreamChunk) -> None:
        """Count the tokens of the choice's next *piece*."""
        self._num_generated[index] += piece.token_id is not None
        if piece.completion is not None:  # exact, because a piece may have the text of several tokens
            self._num_generated[index] = len(piece.completion.token_ids)

    def usage(self, index: int) -> dict[str, int]:
        """Return the choice's `usage` so far, in the format of vLLM's chunks."""
        num_prompt, num_generated = self._num_prompt[index], self._num_generated[index]
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }


def chunk_fields(options: StreamOptions, text: object, logprobs: object, usage: Mapping[str, int]) -> dict[str, object]:
    """Return `usage` and `obfuscation` for a chunk that has a choice, if *options* ask for them.

    `usage` is null unless *options* ask for it in every chunk. `obfuscation` is 1 to 32 random characters. They pad
    *text* (or tool calls) and *logprobs* to a multiple of 32 bytes of JSON. So the size of an encrypted chunk does not
    reveal the length of its token.
    """
    so_far = usage if options.continuous_usage_stats else None
    fields: dict[str, object] = {"usage": so_far} if options.include_usage else {}
    if options.include_obfuscation:
        num_missing = PADDED_BYTES - len(msgspec.json.encode([text, logprobs])) % PADDED_BYTES
        fields["obfuscation"] = secrets.token_urlsafe(num_missing)[:num_missing]
    return fields
