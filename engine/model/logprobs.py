"""Log probabilities of sampled or given tokens, and of the most likely tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MAX_AT_ONCE = 1 << 22  # logits per batch of rows, which are copied to 32 MiB of float64


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural log probabilities at one position, from the model's logits before any sampling parameter applies.

    *logprob* and *rank* belong to the token *token_id*, which was sampled or is part of the prompt. *rank* is 1 plus
    the number of more likely tokens. *top* holds the most likely tokens as pairs of token id and log probability, most
    likely first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int


def step_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_tops: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """Return for each row of *logits* `[rows, vocab]` the log probabilities of its token and of its likeliest tokens.

    *token_ids* has the token of each row. *num_tops* has the number of likeliest tokens to return for each row.
    For a row that needs no log probabilities, both this number and the result are None.
    """
    told: list[TokenLogprobs | None] = [None] * len(token_ids)
    rows = [(row, num_top) for row, num_top in enumerate(num_tops) if num_top is not None]
    for start in range(0, len(rows), at_once := max(1, _MAX_AT_ONCE // logits.shape[-1])):
        some = rows[start : start + at_once]
        row_ids = [row for row, _ in some]
        logprobs = logits[row_ids].double().log_softmax(dim=-1)
        chosen = [token_ids[row] for row in row_ids]
        of_chosen = logprobs[range(len(some)), chosen]
        num_likelier = (logprobs > of_chosen[:, None]).sum(dim=-1)
        values, top_ids = logprobs.topk(min(max(num_top for _, num_top in some), logits.shape[-1]))
        for (row, num_top), token_id, logprob, likelier, *top in zip(
            some, chosen, of_chosen.tolist(), num_likelier.tolist(), top_ids.tolist(), values.tolist(), strict=True
        ):
            pairs = tuple(zip(*(list_[:num_top] for list_ in top), strict=True))
            told[row] = TokenLogprobs(token_id, logprob, pairs, likelier + 1)
    return told
