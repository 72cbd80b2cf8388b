"""A parser that assembles an answer from the events of a streamed completion."""

import json
import math
from collections.abc import Iterator
from typing import Any

from kvtier.cli.prove.answer import Answer, Step


class CompletionStream:
    """A parser of the response to one streamed completion request. Call `add` for each line and then `answer`.

    Log probabilities may have OpenAI's format for completions, or the one for chats, which llama.cpp uses for both. For
    content that is not a completion, the methods raise ValueError, LookupError, TypeError or AttributeError.
    """

    def __init__(self, asked_at: float) -> None:
        self._asked_at = asked_at
        self._first_at: float | None = None
        self._text: list[str] = []
        self._steps: list[Step] = []
        self._usage: dict[str, Any] = {}
        self.error: str | None = None  # the error that the server reported

    def add(self, line: str, at: float) -> None:
        """Parse a line that was received at time *at*, in seconds."""
        if not line.startswith("data:") or line.removeprefix("data:").strip() == "[DONE]":
            return
        event = json.loads(line.removeprefix("data:"))
        if "error" in event:
            error = event["error"]
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        self._usage = event.get("usage") or self._usage
        for choice in event["choices"]:
            self._text.append(choice.get("text") or "")
            self._steps += _steps(choice.get("logprobs"))
            if self._first_at is None and (self._text[-1] or self._steps or choice.get("finish_reason")):
                self._first_at = at

    def answer(self) -> Answer:
        """Return the answer received so far. Raise ValueError if the stream had no token."""
        if self._first_at is None:
            raise ValueError("the stream had no token")
        details = self._usage.get("prompt_tokens_details") or {}
        return Answer(
            "".join(self._text),
            tuple(self._steps),
            self._usage.get("prompt_tokens"),
            details.get("cached_tokens"),
            self._first_at - self._asked_at,
        )


def _steps(logprobs: dict[str, Any] | None) -> Iterator[Step]:
    if not logprobs:
        return
    if "content" in logprobs:
        for item in logprobs["content"] or []:
            listed = item.get("top_logprobs") or [item]
            yield Step(item["token"], {each["token"]: _number(each["logprob"]) for each in listed})
        return
    for token, top in zip(logprobs["tokens"], logprobs.get("top_logprobs") or [], strict=False):
        if top:
            yield Step(token, {name: _number(logprob) for name, logprob in top.items()})


def _number(logprob: float | None) -> float:
    """Return *logprob*, or NaN for None, because servers send JSON null for NaN (caused by NaN in the KV cache)."""
    return math.nan if logprob is None else float(logprob)
