"""The request options that a server accepts and the statistics that it returns, found by trial requests."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from kvtier.cli.prove.answer import Answer
from kvtier.cli.prove.endpoint import Endpoint, Refused
from kvtier.cli.prove.writing import WORDS

_FEW_WORDS = " ".join(WORDS[:40])
_TRIALS: Sequence[Mapping[str, object]] = (
    *({"logprobs": count} for count in (20, 5, 2)),  # vLLM and kvtier return 20 per position, OpenAI's API has 5
    {"ignore_eos": True},  # an answer that ends early has fewer tokens to compare
    {"return_tokens_as_token_ids": True},  # vLLM only; several tokens may have the same text
)
_TOKEN_ID = re.compile(r"token_id:(\d+)")
_T = TypeVar("_T")
_Asked = TypeVar("_Asked")
NUM_TOKENS = 8  # tokens per answer

Prompt: TypeAlias = str | list[int]


@dataclass(frozen=True, slots=True)
class Dialect:
    """The options and statistics that a server supports. *extra* is added to each completion request."""

    extra: Mapping[str, object]
    tells_logprobs: bool
    tells_ids: bool  # returns the ids of an answer's tokens
    tells_cached: bool


def learn(endpoint: Endpoint, model: str) -> Dialect:
    """Find out by trial requests which options a server supports and which statistics it returns.

    Raises OSError or `Refused` if a request without optional parameters fails.
    """
    plain = {"model": model, "prompt": _FEW_WORDS, "max_tokens": 2, "temperature": 0}
    answer = endpoint.complete(plain)
    extra: dict[str, object] = {}
    for trial in _TRIALS:
        if not trial.keys() <= extra.keys():
            tried = unless_refused(endpoint.complete, {**plain, **extra, **trial})
            if tried is not None:
                extra |= trial
                answer = tried
    tells_logprobs = any(len(step.top) > 1 for step in answer.steps)
    return Dialect(extra, tells_logprobs, token_ids_of(answer) is not None, answer.cached_tokens is not None)


def token_ids_of(answer: Answer) -> list[int] | None:
    """Return the ids of an answer's tokens, or None if the server does not return ids."""
    matches = [_TOKEN_ID.fullmatch(step.token) for step in answer.steps]
    ids = [int(match[1]) for match in matches if match]
    return ids if ids and len(ids) == len(answer.steps) else None


def unless_refused(ask: Callable[[_Asked], _T], what: _Asked) -> _T | None:
    """Return `ask(what)`, or None if the server rejects the request. Raise `Refused` for a server error (5xx)."""
    try:
        return ask(what)
    except Refused as error:
        if error.status < 500:
            return None
        raise


@dataclass(frozen=True)
class ModelClient:
    """A thread-safe client for one model of one server. *name* is the name of the model in reports."""

    endpoint: Endpoint
    model: str
    name: str
    dialect: Dialect = field(compare=False)

    def ask(self, prompt: Prompt, salt: str | None = None, is_read: bool = True) -> Answer:
        """Send a prompt and return the greedy answer of `NUM_TOKENS` tokens. Raises the errors of `Endpoint`.

        The server may use only blocks that are cached under *salt*. If *is_read* is False, the request asks the server
        not to read its cache.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, **self.dialect.extra}
        if salt is not None:
            body["cache_salt"] = salt  # vLLM, SGLang, kvtier
        if not is_read:
            body["cache_prompt"] = False  # llama.cpp
        return self.endpoint.complete(body)
