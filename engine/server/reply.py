"""Reply: how an endpoint writes the answer to one request, whole or in chunks."""

import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvtier.engine.async_llm import Piece
from kvtier.engine.scheduling.request import Completion
from kvtier.engine.server.api_error import ApiError
from kvtier.engine.server.generation_request import StreamOptions

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


def chunk_fields(options: StreamOptions, text: object, logprobs: object) -> dict[str, object]:
    """The fields of a chunk beside its choice: `usage`, null until the last chunk, and `obfuscation`, if asked for.

    `obfuscation` is 1 to 32 random characters. With them what differs between the chunks of a stream, *text* (or
    calls) and *logprobs* in JSON, has a multiple of 32 bytes, so that an encrypted stream does not tell the lengths of
    its tokens.
    """
    fields: dict[str, object] = {"usage": None} if options.include_usage else {}
    if options.include_obfuscation:
        num_missing = PADDED_BYTES - len(msgspec.json.encode([text, logprobs])) % PADDED_BYTES
        fields["obfuscation"] = secrets.token_urlsafe(num_missing)[:num_missing]
    return fields
