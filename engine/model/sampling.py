"""Sampling: the parameters that a request gives, and the sampler that draws its tokens."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch

from kvtier.tiers.naming.request_text import check_text

_NUM_LIKELIEST = (
    1024  # the top-p set is nearly always among these, and finding them costs a fraction of sorting a vocabulary
)


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt. The defaults are greedy: 16 tokens, the likeliest each.

    *temperature* 0 is greedy; *top_p* 1 and *top_k* 0 cut nothing off, and *top_k* cuts first. The same *seed* draws
    the same tokens; None draws other ones each time. Generation ends after *max_tokens*, before a *stop* string (which
    is not part of the text), at one of *stop_token_ids*, or at the model's end token unless *ignore_eos*. With
    *logprobs* each token comes with its logarithmic probability and those of so many of the likeliest; None: without.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for stop in self.stop:
            check_text("stop", stop)
        for name in ("max_tokens", "top_k", "logprobs"):  # else a step would fail over 2.5 of them
            value = getattr(self, name)
            _require(value is None or _is_whole(value), name, value, "use a whole number")

        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "ask for at least 1")
        in_range = math.isfinite(self.temperature) and self.temperature >= 0
        _require(in_range, "temperature", self.temperature, "use 0 for greedy, about 1 for the model's own spread")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "use more than 0, and 1 to keep every token")
        _require(self.top_k >= 0, "top_k", self.top_k, "use 0 to keep every token")
        _require(self.seed is None or self.seed >= 0, "seed", self.seed, "use 0 or more, or None for no fixed seed")
        _require((self.logprobs or 0) >= 0, "logprobs", self.logprobs, "use 0 for the token's own, None for none")
        _require(all(self.stop), "stop", self.stop, "leave out the empty string: it would stop everything")


def _is_whole(number: object) -> bool:
    try:
        index(number)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return False
    return True


def _require(fine: bool, name: str, value: object, advice: str) -> None:
    if not fine:
        raise ValueError(f"{name} is {value!r}; {advice}")


class Sampler:
    """Draws the tokens of one request, which owns it; other requests do not change what it draws."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        # One number per token, drawn on the host: unlike a torch.Generator's, a seed means the same on CPU and GPU.
        self._random = random.Random(params.seed)

    def sample(self, logits: torch.Tensor) -> int:
        """The next token id from *logits* `[vocab]`, on any device; the lowest id where greedy meets a tie."""
        if self._params.temperature == 0:
            return int(logits.argmax())

        token_ids, cumulated = _candidates(logits, self._params)
        at = torch.searchsorted(cumulated, self._random.random() * cumulated[-1], right=True)
        return int(at if token_ids is None else token_ids[at])


def _candidates(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The token ids that may be drawn (None: all, in order), and their cumulated probability, both `[num_candidates]`.

    top-k first; top-p keeps the smallest set of what is left whose probability reaches p, and one token at least.
    """
    token_ids = None
    if 0 < params.top_k < len(logits):
        logits, token_ids = logits.topk(params.top_k)

    # In float64 and with 0 for the largest, a tiny temperature overflows nothing and a large vocabulary sums to 1.
    probabilities = ((logits.double() - logits.max()) / params.temperature).softmax(dim=-1)
    if params.top_p == 1:
        return token_ids, probabilities.cumsum(dim=-1)

    if token_ids is None:
        likeliest = probabilities.topk(min(_NUM_LIKELIEST, len(logits)))
        enough = bool(likeliest.values.sum() >= params.top_p)
        probabilities, token_ids = likeliest if enough else probabilities.sort(descending=True)
    cumulated = probabilities.cumsum(dim=-1)
    num_kept = int((cumulated < params.top_p).sum()) + 1
    return token_ids[:num_kept], cumulated[:num_kept]
