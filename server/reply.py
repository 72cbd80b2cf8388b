"""Reply: how an endpoint writes the answer to one request, whole or in chunks."""

import secrets
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvtier.engine.async_llm import Piece
from kvtier.engine.scheduling.request import Completion
from kvtier.server.generation_request import StreamOptions
from kvtier.web.api_error import ApiError

PADDED_BYTES = 32  # a token has up to about 20: so the chunks of nearly all tokens have one size


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice that has ended."""

    index: int
    completion: Completion


class Reply(Protocol):
    """Writes one answer in the form of its endpoint. Owned by one request, whose *usage* it was made with."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, object]:
        """The whole answer, for a request without a stream."""

    def events(self, index: int, piece: Piece) -> Iterator[bytes]:
        """The events of a stream for one piece; none if the piece has nothing to tell."""

    def last_events(self) -> Iterator[bytes]:
        """The events at the end of a stream."""

    def error_event(self, error: ApiError) -> bytes:
        """The event that ends a stream which has failed."""


def envelope(kind: str, prefix: str, model: str) -> dict[str, object]:
    """The fields that every object of one reply begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


class CountedTokens:
    """The tokens of each choice of a stream so far. Owned by one reply."""

    def __init__(self) -> None:
        self._num_prompt: dict[int, int] = {}
        self._num_generated: Counter[int] = Counter()

    def begin(self, index: int, piece: Piece) -> None:
        """Take note of the prompt of the choice at *index*, which each *piece* knows."""
        self._num_prompt[index] = piece.tokens.num_tokens

    def add(self, index: int, piece: Piece) -> None:
        """Count the tokens of the choice's next *piece*."""
        self._num_generated[index] += piece.token_id is not None
        if piece.completion is not None:  # a piece may have several tokens' text, the completion has them all
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
    """The fields of a chunk beside its choice: `usage`, null until the last chunk unless the *usage* so far is asked
    for, and `obfuscation`, if asked for.

    `obfuscation` is 1 to 32 random characters. With them what differs between the chunks of a stream, *text* (or
    calls) and *logprobs* in JSON, has a multiple of 32 bytes, so that an encrypted stream does not tell the lengths of
    its tokens.
    """
    so_far = usage if options.continuous_usage_stats else None
    fields: dict[str, object] = {"usage": so_far} if options.include_usage else {}
    if options.include_obfuscation:
        num_missing = PADDED_BYTES - len(msgspec.json.encode([text, logprobs])) % PADDED_BYTES
        fields["obfuscation"] = secrets.token_urlsafe(num_missing)[:num_missing]
    return fields
