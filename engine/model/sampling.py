"""SamplingParams: how to continue one prompt."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING

from kvtier.tiers.naming.request_text import check_text

if TYPE_CHECKING:  # it raises WrongParameter
    from kvtier.engine.model.structured.structured_outputs import StructuredOutputs

MAX_BIAS = 100.0  # as at OpenAI and vLLM


class WrongParameter(ValueError):
    """A sampling parameter that cannot be used. *name* is the parameter's, *what* is wrong with it."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name} {message}")
        self.name = name
        self.what = message


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt. The defaults are greedy: 16 tokens, the likeliest each.

    *temperature* 0 is greedy; *min_p* 0, *top_k* 0 and *top_p* 1 cut nothing off. *min_p* cuts what is less likely than
    so large a part of the likeliest token, *top_k* keeps so many, and *top_p* cuts last. The same *seed* draws the same
    tokens; None draws other ones each time.

    Before that logits are changed, as in vLLM: *logit_bias* is added by token id (beyond 100 it counts as 100).
    *repetition_penalty* divides positive logits of tokens in prompt and output and multiplies negative ones.
    *frequency_penalty* is subtracted as often as the output has the token, *presence_penalty* once if it has it.
    *bad_words* are never completed by the output.

    Generation ends after *max_tokens* (0: the prompt is computed, and nothing is generated), before a *stop* string
    (which is not part of the text), at one of *stop_token_ids*, or at the model's end token unless *ignore_eos*; by
    none of the last three within the first *min_tokens*. With *logprobs* each token comes with its logarithmic
    probability and those of so many of the likeliest, before all of the above; None: without. *prompt_logprobs* asks
    for the same of the prompt's tokens: all of them are computed then, cached or not. Special tokens are left out of
    the text, but for those of *shown_token_ids*.

    With *structured_outputs* the text follows a schema or a grammar, whatever else changes the logits, and ends where
    that is complete, whatever *min_tokens* say.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    bad_words: Sequence[str] = ()
    prompt_logprobs: int | None = None
    shown_token_ids: Sequence[int] = ()
    structured_outputs: "StructuredOutputs | None" = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            object.__setattr__(self, name, (texts,) if isinstance(texts, str) else tuple(texts))
        for name in ("stop_token_ids", "shown_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_texts()
        for name in (
            "max_tokens",
            "min_tokens",
            "top_k",
            "logprobs",
            "prompt_logprobs",
        ):  # else a step would fail over 2.5 of them
            value = getattr(self, name)
            _require(value is None or _is_whole(value), name, value, "use a whole number")

        _require(self.max_tokens >= 0, "max_tokens", self.max_tokens, "ask for 1 or more, or 0 for none")
        in_range = math.isfinite(self.temperature) and self.temperature >= 0
        _require(in_range, "temperature", self.temperature, "use 0 for greedy, about 1 for the model's own spread")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "use more than 0, and 1 to keep every token")
        _require(self.top_k >= 0, "top_k", self.top_k, "use 0 to keep every token")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "use 0 to keep every token, and 1 at most")
        _require(self.seed is None or self.seed >= 0, "seed", self.seed, "use 0 or more, or None for no fixed seed")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require((value or 0) >= 0, name, value, "use 0 for the token's own, None for none")
        in_range = 0 <= self.min_tokens <= self.max_tokens
        _require(in_range, "min_tokens", self.min_tokens, f"use 0 or more, and max_tokens {self.max_tokens} at most")
        self._check_penalties()

    def _check_texts(self) -> None:
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                check_text(name, text)
        _require(all(self.stop), "stop", self.stop, "leave out the empty string: it would stop everything")
        are_words = all(word.strip() for word in self.bad_words)
        _require(are_words, "bad_words", self.bad_words, "leave out what has no letters: it would forbid everything")

    def _check_penalties(self) -> None:
        factor = self.repetition_penalty
        in_range = math.isfinite(factor) and factor > 0
        _require(in_range, "repetition_penalty", factor, "use 1 for none, and more than 1 for fewer repetitions")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "use -2 to 2, and 0 for none")
        for token_id, bias in self.logit_bias.items():
            fine = _is_whole(token_id) and token_id >= 0 and not math.isnan(bias)
            _require(fine, "logit_bias", {token_id: bias}, "give token ids and numbers between -100 and 100")
        within = {index(i): max(-MAX_BIAS, min(MAX_BIAS, bias)) for i, bias in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", within)


def _is_whole(number: object) -> bool:
    try:
        index(number)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return False
    return True


def _require(fine: bool, name: str, value: object, advice: str) -> None:
    if not fine:
        raise WrongParameter(name, f"is {value!r}; {advice}")
