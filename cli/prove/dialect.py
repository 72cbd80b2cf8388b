"""Dialect: what a server takes beside a model and a prompt, and what it tells; learned by asking."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtier.cli.prove.answer import Answer
from kvtier.cli.prove.endpoint import Endpoint, Refused
from kvtier.cli.prove.writing import WORDS

_FEW_WORDS = " ".join(WORDS[:40])
_TRIALS: Sequence[Mapping[str, object]] = (
    *({"logprobs": count} for count in (20, 5, 2)),  # vLLM and kvtier tell 20 of a place, OpenAI's interface has 5
    {"ignore_eos": True},  # an answer that ends early tells less
    {"return_tokens_as_token_ids": True},  # vLLM's: a token's text may be another's too
)
_TOKEN_ID = re.compile(r"token_id:(\d+)")
_T = TypeVar("_T")
_Asked = TypeVar("_Asked")


@dataclass(frozen=True, slots=True)
class Dialect:
    """*extra* goes with each completion."""

    extra: Mapping[str, object]
    tells_logprobs: bool
    tells_ids: bool  # of an answer's tokens
    tells_cached: bool


def learn(endpoint: Endpoint, model: str) -> Dialect:
    """Ask a few words in several ways. OSError and `Refused` if they cannot be asked at all."""
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
    """The ids of an answer's tokens, if the server tells them."""
    matches = [_TOKEN_ID.fullmatch(step.token) for step in answer.steps]
    ids = [int(match[1]) for match in matches if match]
    return ids if ids and len(ids) == len(answer.steps) else None


def unless_refused(ask: Callable[[_Asked], _T], what: _Asked) -> _T | None:
    """What the server answers; None if it does not take such a request. `Refused` if it has failed."""
    try:
        return ask(what)
    except Refused as error:
        if error.status < 500:
            return None
        raise
