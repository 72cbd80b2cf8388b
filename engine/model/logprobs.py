"""Logarithmic probabilities of the tokens that were chosen, and of the likeliest."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before temperature and cuts.

    *logprob* is that of the chosen token; *top* has the likeliest tokens as pairs of token id and logarithm, likeliest
    first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """The logarithms of the chosen token and of the *num_top* likeliest, from *logits* `[vocab]`."""
    logprobs = logits.double().log_softmax(dim=-1)
    values, token_ids = logprobs.topk(min(num_top, len(logprobs)))
    top = tuple(zip(token_ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[token_id]), top)
