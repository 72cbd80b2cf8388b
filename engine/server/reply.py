"""Reply: the answer to one request, as its endpoint writes it, whole or in chunks."""

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.engine.async_llm import Piece
from kvtier.engine.scheduling.request import Completion
from kvtier.engine.server.usage import Usage


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice, complete."""

    index: int
    completion: Completion


class Reply(Protocol):
    """How an endpoint writes its answers. Owned by one request."""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, object]:
        """The object that answers a request without a stream."""

    def chunks(self, index: int, piece: Piece) -> Iterator[dict[str, object]]:
        """The objects that tell a stream of a piece; none if there is nothing to tell."""

    def last_chunk(self, usage: Usage) -> dict[str, object]:
        """The object at a stream's end that says what it took."""


def envelope(kind: str, prefix: str, model: str) -> dict[str, object]:
    """What every object of one reply begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
