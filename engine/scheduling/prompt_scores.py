"""PromptScores: the log probabilities of a prompt's own tokens, taken as the prompt is computed."""

from collections.abc import Sequence

import torch

from kvtier.engine.model.logprobs import TokenLogprobs, step_logprobs


class PromptScores:
    """What the model thinks of each token of one prompt, in order. Owned by the request.

    A token is scored by the logits of the one before it; the first has none. So cached tokens are of no use, but those
    that were computed and scored before the request was preempted.
    """

    def __init__(self, token_ids: Sequence[int], num_top: int) -> None:
        """Of each of *token_ids* so many of the likeliest are told."""
        self._token_ids = token_ids
        self._num_top = num_top
        self.told: list[TokenLogprobs | None] = [None]  # of the prompt's first tokens, as many as are known

    @property
    def num_used(self) -> int:
        """The prompt's first tokens whose logits have been used."""
        return len(self.told) - 1

    @property
    def is_complete(self) -> bool:
        """Whether all of the prompt's tokens are scored."""
        return len(self.told) >= len(self._token_ids)

    def wanted(self, start: int, end: int) -> range:
        """Those of the tokens *start* to *end* of the request whose logits are still wanted."""
        return range(max(start, self.num_used), min(end, len(self._token_ids) - 1))

    def add(self, logits: torch.Tensor) -> None:
        """Score the next tokens by the *logits* `[tokens, vocab]` of those before them."""
        first = len(self.told)
        scored = self._token_ids[first : first + len(logits)]
        self.told += step_logprobs(logits, scored, [self._num_top] * len(scored))
