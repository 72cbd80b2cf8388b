"""How likely the model found the tokens that were chosen."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithm of the model's own probability, before temperature and cuts, of a token that was chosen,
    and of the *top* likeliest as pairs of token id and logarithm, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """What *logits* `[vocab]` say about the chosen token and the *num_top* likeliest."""
    logprobs = logits.double().log_softmax(dim=-1)
    values, token_ids = logprobs.topk(min(num_top, len(logprobs)))
    top = tuple(zip(token_ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[token_id]), top)
