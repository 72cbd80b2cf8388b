"""MessageReply: how `/v1/messages` writes its answers."""

import uuid
from collections.abc import Iterator, Sequence

from kvtier.engine.async_llm import Piece
from kvtier.engine.documents.kept_prefixes import Keeping
from kvtier.engine.scheduling.request import Completion, FinishReason
from kvtier.engine.server.anthropic.error_object import error_object
from kvtier.engine.server.api_error import ApiError
from kvtier.engine.server.cache_usage import CacheUsage
from kvtier.engine.server.event_stream import named_event
from kvtier.engine.server.reply import Answer
from kvtier.engine.server.usage import Usage
from kvtier.tiers.lower.statistics import TokenBalance


class MessageReply:
    """A `Reply` with one choice. Its stream begins with what the prompt took, and ends with what the answer took."""

    def __init__(self, model: str, usage: Usage, request_id: str, only_warms: bool) -> None:
        """With *only_warms* nothing of the answer is told."""
        self._usage = usage
        self._request_id = request_id
        self._only_warms = only_warms
        self._has_begun = False
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def whole(self, answers: Sequence[Answer]) -> dict[str, object]:
        (answer,) = answers
        content = [] if self._only_warms else [{"type": "text", "text": answer.completion.text}]
        usage = {**self._of_prompt(answer.completion.tokens), "output_tokens": self._num_told(answer.completion)}
        return {
            **self._head,
            "content": content,
            **_ending(answer.completion),
            "usage": usage,
            "kvtier": self._usage.kvtier(),
        }

    def events(self, index: int, piece: Piece) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield from self._beginning(piece)
        if piece.text and not self._only_warms:
            yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece.text})
        if (done := piece.completion) is not None:
            if not self._only_warms:
                yield _event("content_block_stop", index=0)
            usage = {**self._of_prompt(done.tokens), "output_tokens": self._num_told(done)}
            yield _event("message_delta", delta=_ending(done), usage=usage, kvtier=self._usage.kvtier())

    def last_events(self) -> Iterator[bytes]:
        yield _event("message_stop")

    def error_event(self, error: ApiError) -> bytes:
        return named_event("error", error_object(error, self._request_id))

    def _beginning(self, piece: Piece) -> Iterator[bytes]:
        usage = {**self._of_prompt(piece.tokens), "output_tokens": 0}
        message: dict[str, object] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        yield _event("message_start", message=message)
        if not self._only_warms:
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def _of_prompt(self, tokens: TokenBalance) -> dict[str, object]:
        return CacheUsage.of(tokens, self._usage.kept or Keeping()).anthropic()

    def _num_told(self, completion: Completion) -> int:
        return 0 if self._only_warms else len(completion.token_ids)


def _ending(completion: Completion) -> dict[str, str | None]:
    """Why the answer has ended, in Anthropic's words."""
    if completion.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    reason = "end_turn" if completion.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": completion.stop}


def _event(kind: str, **fields: object) -> bytes:
    return named_event(kind, {"type": kind, **fields})
