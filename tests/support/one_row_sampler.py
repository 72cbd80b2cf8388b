"""The sampling of one row, step by step over its whole vocabulary: what the batch must be equal to."""

import random
from collections.abc import Sequence

import torch

from kvtier.engine.model.sampling import SamplingParams


def plainly_changed(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> torch.Tensor:
    """A copy of *logits* `[vocab]` with bias and penalties, as vLLM defines them, token by token."""
    changed = logits.clone()
    for token_id, bias in params.logit_bias.items():
        changed[token_id] += bias
    for token_id in {*prompt, *output}:
        factor = params.repetition_penalty
        changed[token_id] = changed[token_id] / factor if changed[token_id] > 0 else changed[token_id] * factor
    for token_id in set(output):
        changed[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    return changed


def plainly_cut(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids that may be drawn and their probabilities, which sum to what was kept, both `[kept]`.

    In the order in which a draw counts them off: that of the ids if nothing is cut off, else the likeliest first.
    """
    probabilities = ((logits.double() - logits.max()) / params.temperature).softmax(dim=-1)
    if params.top_p == 1 and not 0 < params.top_k < len(logits) and not params.min_p:
        return torch.arange(len(logits)), probabilities
    probabilities, token_ids = probabilities.sort(descending=True, stable=True)
    num_kept = int((probabilities >= params.min_p * probabilities[0]).sum())
    num_kept = min(num_kept, params.top_k or num_kept)
    probabilities = probabilities[:num_kept] / probabilities[:num_kept].sum()
    if params.top_p < 1:
        num_kept = min(num_kept, int((probabilities.cumsum(dim=-1) < params.top_p).sum()) + 1)
    return token_ids[:num_kept], probabilities[:num_kept]


class OneRowSampler:
    """Draws the tokens of one request, one row at a time."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self._params = params
        self._prompt = prompt
        self._random = random.Random(params.seed)
        self.output: list[int] = []

    def sample(self, logits: torch.Tensor) -> int:
        """The next token id from *logits* `[vocab]`."""
        logits = plainly_changed(logits, self._params, self._prompt, self.output)
        if self._params.temperature == 0:
            token_id = int(logits.argmax())
        else:
            token_ids, probabilities = plainly_cut(logits, self._params)
            cumulated = probabilities.cumsum(dim=-1)
            token_id = int(token_ids[torch.searchsorted(cumulated, self._random.random() * cumulated[-1], right=True)])
        self.output.append(token_id)
        return token_id
