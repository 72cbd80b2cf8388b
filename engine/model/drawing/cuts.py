"""Cuts: sampling with temperature, min-p, top-k and top-p, for several rows of logits at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.engine.model.drawing.ranking import Ranking, Scratch
from kvtier.engine.model.drawing.sampler import Sampler

_NUM_LIKELIEST = 256  # a trained model's top-p set is nearly always within these most likely tokens
_FEWEST, _MAX = 32, 2048  # bounds on the number of most likely tokens to examine, if all rows have a top-k
# An upper bound on the relative error of a sum of float32 exponentials: three roundings of an exponent of 40 nats, and
# the rounding of the sum.
_FLOAT32_ERROR = 2e-5
_MIN_TEMPERATURE = 1e-30  # in float32, lower temperatures count as this, because the reciprocal must be finite


@dataclass(frozen=True, slots=True)
class Cuts:
    """The sampling parameters of several rows, each `[rows]`, and one random number from 0 to 1 for each row.

    min-p and top-k apply first, and their order does not matter. Of the remaining tokens, top-p keeps the smallest
    number of most likely tokens whose total probability is at least p. At least one token is kept. Of equally likely
    tokens, those with lower ids are kept first.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor  # the vocabulary's size if there is no limit
    number: torch.Tensor

    @classmethod
    def of(cls, samplers: Sequence[Sampler], logits: torch.Tensor) -> "Cuts":
        """Return the samplers' parameters for *logits* `[rows, vocab]`, with their next random numbers."""
        vocab_size = logits.shape[-1]
        rows = [(s.params.temperature, s.params.top_p, s.params.min_p, s.params.top_k, s.number()) for s in samplers]
        table = torch.tensor(rows, dtype=torch.float64, device=logits.device)
        top_k = torch.where(table[:, 3] > 0, table[:, 3], vocab_size).clamp(max=vocab_size).long()
        return cls(table[:, 0], table[:, 1], table[:, 2], top_k, table[:, 4])

    def num_likeliest(self, vocab_size: int) -> int:
        """Return how many of the most likely tokens `draw` examines first."""
        limit = int(self.top_k.max())
        num_wanted = _NUM_LIKELIEST if limit == vocab_size else min(max(limit + 1, _FEWEST), _MAX)
        return min(num_wanted, vocab_size)

    def __getitem__(self, rows: torch.Tensor) -> "Cuts":
        """Return the sampling parameters and random numbers of the rows of logits with the indices *rows*."""
        return Cuts(self.temperature[rows], self.top_p[rows], self.min_p[rows], self.top_k[rows], self.number[rows])


def draw(logits: torch.Tensor, cuts: Cuts, scratch: Scratch) -> torch.Tensor:
    """Sample a token id for each row, `[rows]`, from *logits* `[rows, vocab]`.

    The most likely tokens are examined first. If they do not suffice for a row, all its tokens are ranked. Both ways
    give the same token.
    """
    token_ids, is_drawn = _from_likeliest(logits, cuts, scratch)
    if not is_drawn.any():
        return _from_ranking(logits, cuts, scratch)
    if not is_drawn.all():
        others = (~is_drawn).nonzero()[:, 0]
        token_ids[others] = _from_ranking(logits[others], cuts[others], scratch)
    return token_ids


def argmax_tokens(logits: torch.Tensor, cuts: Cuts, scratch: Scratch) -> torch.Tensor:
    """Return the most likely token of each row; of equally likely tokens, the one with the lowest id."""
    return logits.argmax(dim=-1)


def draw_uncut(logits: torch.Tensor, cuts: Cuts, scratch: Scratch) -> torch.Tensor:
    """Sample a token id for each row, without top-k, top-p and min-p: every token of the vocabulary takes part."""
    cumulated = _weights(logits, logits.amax(dim=-1), cuts.temperature, scratch).cumsum_(dim=-1)
    wanted = cuts.number[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, wanted, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)


def _from_likeliest(logits: torch.Tensor, cuts: Cuts, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample from the most likely tokens only.

    Return a token for each row, and whether this token is certainly the one that sampling from all tokens would give.
    """
    vocab_size = logits.shape[-1]
    num_there = cuts.num_likeliest(vocab_size)
    values, token_ids = _likeliest(logits, num_there)
    weights = _weights(values, values[:, 0], cuts.temperature, scratch)
    cumulated = weights.cumsum(dim=-1)

    num_above = (weights >= cuts.min_p[:, None]).sum(dim=-1)
    num_kept = cuts.top_k.minimum(torch.where(num_above < num_there, num_above, vocab_size))
    at_edge = num_kept.clamp(1, num_there)[:, None] - 1
    # topk may have left out tokens that are as likely as the last of *values* and have lower ids.
    is_whole = values > values[:, -1:] if num_there < vocab_size else torch.ones_like(values, dtype=torch.bool)
    is_known = (num_kept <= num_there) & is_whole.gather(1, at_edge)[:, 0]
    total, error = cumulated.gather(1, at_edge)[:, 0], torch.zeros_like(cuts.top_p)
    is_summed = ~is_known & (num_kept == vocab_size) & (cuts.min_p == 0)
    if is_summed.any():
        nearly = _exponents(logits, values[:, 0], cuts.temperature, scratch).exp_().sum(dim=-1)
        total = torch.where(is_known, total, nearly.double())
        error = torch.where(is_known, error, _FLOAT32_ERROR)

    fewest, limit = ((cumulated < (cuts.top_p * total * (1 + e))[:, None]).sum(dim=-1) for e in (-error, error))
    at_end = torch.where(is_known, limit.minimum(at_edge[:, 0]), limit.clamp(max=num_there - 1))[:, None]
    is_certain = (fewest == limit) & (limit < num_there) & is_whole.gather(1, at_end)[:, 0]
    wanted = cuts.number[:, None] * cumulated.gather(1, at_end)
    at = (cumulated <= wanted).sum(dim=-1, keepdim=True).minimum(at_end)
    is_number = values[:, 0].isfinite()  # any token will do for a row whose largest logit is not finite
    return token_ids.gather(1, at)[:, 0], is_known | (is_summed & is_certain) | ~is_number


def _likeliest(logits: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logits of each row and their token ids, the largest first.

    Equal logits are in the order of their ids, which topk does not guarantee.
    """
    token_ids = logits.topk(num_tokens).indices.sort(dim=-1).values
    values, order = logits.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, order)


def _from_ranking(logits: torch.Tensor, cuts: Cuts, scratch: Scratch) -> torch.Tensor:
    largest = logits.amax(dim=-1)
    weights = _weights(logits, largest, cuts.temperature, scratch)
    if cuts.min_p.any():
        weights.masked_fill_(weights < cuts.min_p[:, None], 0.0)
    ranking = Ranking(_exponents(logits, largest, cuts.temperature, scratch).neg_(), weights, scratch)
    reached = ranking.total
    if (cuts.top_k < logits.shape[-1]).any():
        reached = ranking.at_rank(cuts.top_k)
    _, kept = ranking.at_weight(cuts.top_p * reached)
    token_ids, _ = ranking.at_weight(cuts.number * kept)
    return token_ids


def _weights(logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Return each token's probability relative to the most likely one, in the scratch's float64 tensor."""
    # Subtracting the largest logit avoids overflow at tiny temperatures. float64 keeps sums over a large vocabulary
    # exact enough.
    weights = scratch.copy(logits, torch.float64)
    return weights.sub_(largest[:, None]).div_(temperature[:, None]).exp_()


def _exponents(
    logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, scratch: Scratch
) -> torch.Tensor:
    """Return each token's approximate log-probability relative to the most likely one, in the scratch's float32 tensor.

    A more likely token never has a smaller value than a less likely one.
    """
    factor = temperature.clamp(min=_MIN_TEMPERATURE).reciprocal().float()
    return scratch.copy(logits, torch.float32).sub_(largest[:, None]).mul_(factor[:, None])
