"""Logarithmic probabilities of tokens that were chosen or given, and of the likeliest."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MAX_AT_ONCE = 1 << 22  # logits that are looked at together: 32 MiB of float64, for which rows are copied


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before temperature and cuts.

    *logprob* is that of the token that was chosen, or that the prompt has; *top* has the likeliest tokens as pairs of
    token id and logarithm, likeliest first. *rank* is 1 more than the number of tokens that are likelier.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int


def step_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_tops: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """The logarithms of the token of each row of *logits* `[rows, vocab]`, and of the row's likeliest.

    *num_tops* says how many of these for each row; None for a row of which nothing is asked.
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
