"""Reply: how an endpoint writes the answer to one request, whole or in chunks."""

import secrets
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvtier.engine.async_llm import StreamChunk
from kvtier.engine.scheduling.request import Completion
from kvtier.server.generation_request import StreamOptions
from kvtier.web.api_error import ApiError
from kvtier.web.event_stream import data_event

PADDED_BYTES = 32  # a token has up to about 20 bytes, so the chunks of nearly all tokens have the same size


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice that has ended."""

    index: int
    completion: Completion


class Reply(Protocol):
    """A writer of one answer in the format of its endpoint. Owned by one request."""

    def whole(self, answers: Sequence[Answer]) -> msgspec.Struct:
        """Return the whole answer, for a request without a stream."""

    def events(self, index: int, piece: StreamChunk) -> Iterator[bytes]:
        """Yield the events of a stream for one piece; none if the piece adds nothing."""

    def last_events(self) -> Iterator[bytes]:
        """Yield the events at the end of a stream."""

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a failed stream."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that the whole answer and every chunk of one reply in OpenAI's format have in common."""

    id: str
    created: int  # seconds since 1970
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> "Envelope":
        """Return an envelope with a new id, which begins with *prefix*, and with the current time."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)

    def chunk(self, kind: str, choices: Sequence[object], fields: Mapping[str, object]) -> bytes:
        """Return the event of a chunk of this *kind*, with *fields* in addition to its *choices*."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return data_event({**head, "choices": choices, **fields})


class CountedTokens:
    """Token counts of each choice of a stream so far. Owned by one reply."""

    def __init__(self) -> None:
        self._num_prompt: dict[int, int] = {}
        self._num_generated: Counter[int] = Counter()

    def begin(self, index: int, piece: StreamChunk) -> None:
        """Record the length of the prompt of the choice at *index*; every *piece* of the choice has it."""
        self._num_prompt[index] = piece.tokens.num_tokens

    def add(self, index: int, piece: StreamChunk) -> None:
        """Count the tokens of the choice's next *piece*."""
        self._num_generated[index] += piece.token_id is not None
        if piece.completion is not None:  # exact, because a piece may have the text of several tokens
            self._num_generated[index] = len(piece.completion.token_ids)

    def usage(self, index: int) -> dict[str, int]:
        """Return the choice's `usage` so far, as vLLM's chunks have it."""
        num_prompt, num_generated = self._num_prompt[index], self._num_generated[index]
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }


def chunk_fields(options: StreamOptions, text: object, logprobs: object, usage: Mapping[str, int]) -> dict[str, object]:
    """Return the fields of a chunk in addition to its choice: `usage` and `obfuscation`, if asked for.

    `usage` is null until the last chunk, unless the request asks for the *usage* so far. `obfuscation` is 1 to 32
    random characters. They pad the varying part of a chunk, *text* (or calls) and *logprobs* in JSON, to a multiple of
    32 bytes, so that an encrypted stream does not reveal the lengths of its tokens.
    """
    so_far = usage if options.continuous_usage_stats else None
    fields: dict[str, object] = {"usage": so_far} if options.include_usage else {}
    if options.include_obfuscation:
        num_missing = PADDED_BYTES - len(msgspec.json.encode([text, logprobs])) % PADDED_BYTES
        fields["obfuscation"] = secrets.token_urlsafe(num_missing)[:num_missing]
    return fields
