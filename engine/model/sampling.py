"""SamplingParams: the sampling parameters of one request."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING

from kvtier.tiers.naming.request_text import check_text

if TYPE_CHECKING:  # an import cycle: that module raises InvalidParameter
    from kvtier.engine.model.structured.structured_outputs import StructuredOutputs

MAX_BIAS = 100.0  # the limit of OpenAI and vLLM


class InvalidParameter(ValueError):
    """An error for an invalid sampling parameter.

    *name* is the parameter's name, with which the message begins. *what* is the rest of the message.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name} {message}")
        self.name = name
        self.what = message


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. The defaults give greedy sampling of 16 tokens.

    *temperature* 0 is greedy. Otherwise three filters are applied in this order. *min_p* removes the tokens that are
    less likely than this fraction of the most likely token's probability. *top_k* keeps this many of the most likely
    tokens. *top_p* keeps the most likely tokens with this total probability. *min_p* 0, *top_k* 0 and *top_p* 1 keep
    every token. The same *seed* draws the same tokens; None draws different tokens each time.

    Before these filters, logits are changed as in vLLM. *logit_bias* maps token ids to numbers that are added to their
    logits, limited to -100 to 100. *repetition_penalty* divides positive logits of tokens in prompt and output, and
    multiplies negative ones. *frequency_penalty* is subtracted once per occurrence of the token in the output.
    *presence_penalty* is subtracted once if the token occurs in the output. The output never completes one of the
    *bad_words*.

    Generation ends after *max_tokens* tokens, at a *stop* string, at one of *stop_token_ids*, or at the model's end
    token unless *ignore_eos* is set. The stop string is not part of the text. With *max_tokens* 0, the prompt is
    computed and nothing is generated. Within the first *min_tokens* tokens, only *max_tokens* or a complete structured
    output ends generation. Special tokens are not part of the text, except those of *shown_token_ids*.

    With *logprobs* n, each token comes with its own log probability and with those of the n most likely tokens. They
    are computed before all changes to the logits. None disables log probabilities. *prompt_logprobs* does the same for
    the prompt's tokens, which are then all computed even if they are cached.

    With *structured_outputs* the text follows a schema or a grammar, regardless of other changes to the logits. It ends
    when it is complete by the schema or grammar, even within the first *min_tokens* tokens.
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
        ):  # otherwise a step would fail, for example with max_tokens=2.5
            value = getattr(self, name)
            _require(value is None or _is_whole(value), name, value, "use a whole number")

        _require(self.max_tokens >= 0, "max_tokens", self.max_tokens, "use 1 or more, or 0 to generate nothing")
        in_range = math.isfinite(self.temperature) and self.temperature >= 0
        _require(in_range, "temperature", self.temperature, "use 0 for greedy sampling, or a positive number")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "use a number above 0, up to 1; 1 keeps every token")
        _require(self.top_k >= 0, "top_k", self.top_k, "use 1 or more, or 0 to keep every token")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "use a number from 0 to 1; 0 keeps every token")
        _require(self.seed is None or self.seed >= 0, "seed", self.seed, "use 0 or more, or None for no fixed seed")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require((value or 0) >= 0, name, value, "use 0 or more, or None for no log probabilities")
        in_range = 0 <= self.min_tokens <= self.max_tokens
        _require(in_range, "min_tokens", self.min_tokens, f"use 0 to {self.max_tokens} (max_tokens)")
        self._check_penalties()

    def _check_texts(self) -> None:
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                check_text(name, text)
        _require(all(self.stop), "stop", self.stop, "remove the empty string, which would stop every text")
        are_words = all(word.strip() for word in self.bad_words)
        _require(are_words, "bad_words", self.bad_words, "remove blank strings, which would forbid every text")

    def _check_penalties(self) -> None:
        factor = self.repetition_penalty
        in_range = math.isfinite(factor) and factor > 0
        _require(in_range, "repetition_penalty", factor, "use 1 for no penalty, or more for fewer repetitions")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "use -2 to 2; 0 is no penalty")
        for token_id, bias in self.logit_bias.items():
            fine = _is_whole(token_id) and token_id >= 0 and not math.isnan(bias)
            _require(fine, "logit_bias", {token_id: bias}, "give token ids and numbers between -100 and 100")
        within = {index(i): max(-MAX_BIAS, min(MAX_BIAS, bias)) for i, bias in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", within)


def _is_whole(number: object) -> bool:
    try:
        index(number)  # type: ignore[arg-type]  # raises if the type is wrong
    except TypeError:
        return False
    return True


def _require(fine: bool, name: str, value: object, advice: str) -> None:
    if not fine:
        raise InvalidParameter(name, f"is {value!r}; {advice}")
