"""Ranking: finds tokens by rank or cumulated probability in several rows of logits, without sorting whole rows."""

from math import prod

import torch

# A bin is a hundredth of a nat wide. Sorting 32 rows of 152,064 tokens takes 0.4 s on a CPU, filling bins 0.03 s.
_NUM_BINS = 4096
_SPAN = 40.0  # nats below the most likely token; less likely tokens are in the last bin


class Scratch:
    """Reusable memory for temporary tensors: one tensor of each dtype, allocated on first use.

    Every call for a dtype returns the same memory, so it overwrites the previous result. With new memory for each
    tensor, passes over logits took up to 1.5 times as long (DESIGN.md, section 10).
    """

    def __init__(self, num_elements: int, device: torch.device) -> None:
        """Create an empty scratch for tensors of up to *num_elements* elements."""
        self._num_elements = num_elements
        self._device = device
        self._made: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor of *dtype* in this *shape*, with undefined content."""
        if dtype not in self._made:
            self._made[dtype] = torch.empty(self._num_elements, dtype=dtype, device=self._device)
        return self._made[dtype][: prod(shape)].view(shape)

    def copy(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copy *values* into the tensor of *dtype*, and return this tensor."""
        return self.tensor(values.shape, dtype).copy_(values)


class Ranking:
    """Weights of tokens, `[rows, vocab]`, that can be queried as if each row were sorted.

    The order is by weight, the largest first, and by token id for equal weights. To avoid sorting whole rows, tokens
    of similar weight are put into a bin, and a query sorts only one bin of each row.
    """

    def __init__(self, depths: torch.Tensor, weights: torch.Tensor, scratch: Scratch) -> None:
        """Put tokens of similar weight into the same bin.

        Takes ownership of both tensors and of the scratch's int64 tensor.

        Args:
            depths: Log-probability of the row's most likely token minus that of each token, `[rows, vocab]` in float32.
                A token with a larger weight must not have a larger depth.
            weights: Probabilities relative to that of the row's most likely token, `[rows, vocab]` in float64; 0 for a
                token that was cut off.
            scratch: Provides memory for the bin of each token.
        """
        depths.clamp_(max=_SPAN).mul_((_NUM_BINS - 1) / _SPAN)  # clamped first, because depths may be infinite
        self._bins = scratch.copy(depths, torch.int64)  # [rows, vocab]
        self._weights = weights
        self._cumulated = self._in_bins(weights)

    @property
    def total(self) -> torch.Tensor:
        """Sum of the weights of all tokens in each row, `[rows]`."""
        return self._cumulated[:, -1]

    def at_weight(self, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each row the first token at which the cumulated weight reaches *wanted* `[rows]`.

        Returns:
            The token ids and the cumulated weights at these tokens, both `[rows]`.
        """
        wanted = wanted.minimum(self.total)[:, None]
        token_ids, cumulated, counts = self._sorted_bin(torch.searchsorted(self._cumulated, wanted))
        at = (cumulated < wanted).sum(dim=-1, keepdim=True).minimum(counts - 1)
        return token_ids.gather(1, at)[:, 0], cumulated.gather(1, at)[:, 0]

    def at_rank(self, rank: torch.Tensor) -> torch.Tensor:
        """Return for each row the total weight of its most likely tokens, `[rows]`.

        *rank* says for each row how many tokens to add up, from 1 to the vocabulary's size. A token's weight is its
        relative probability.
        """
        wanted = rank.double()[:, None]
        counts = self._in_bins(torch.ones_like(self._weights))
        bin_ids = torch.searchsorted(counts, wanted)
        _, cumulated, _ = self._sorted_bin(bin_ids)
        return cumulated.gather(1, (wanted - _before(counts, bin_ids)).long() - 1)[:, 0]

    def _in_bins(self, amounts: torch.Tensor) -> torch.Tensor:
        """Return the sum of the tokens' *amounts* in each bin and all bins before it, `[rows, bins]`."""
        empty = amounts.new_zeros(len(amounts), _NUM_BINS)
        return empty.scatter_add_(1, self._bins, amounts).cumsum(dim=-1)

    def _sorted_bin(self, bin_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort the tokens of one bin (tokens of similar weight) of each row, the most likely first.

        Returns:
            The token ids, `[rows, longest]` with padding. Their running sums, in the same shape: each is the sum of the
            weights of all tokens of the row up to this one. The number of tokens in the bin, `[rows, 1]`.
        """
        rows, ids = (self._bins == bin_ids).nonzero(as_tuple=True)  # ids rise within a row
        counts = torch.bincount(rows, minlength=len(bin_ids))
        columns = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        shape = len(bin_ids), int(counts.max())
        token_ids = ids.new_zeros(shape)
        token_ids[rows, columns] = ids
        weights = self._weights.new_full(shape, -1.0)  # sorts the padding to the end
        weights[rows, columns] = self._weights[rows, ids]
        weights, order = weights.sort(dim=-1, descending=True, stable=True)
        cumulated = _before(self._cumulated, bin_ids) + weights.clamp_(min=0).cumsum(dim=-1)
        return token_ids.gather(1, order), cumulated, counts[:, None]


def _before(cumulated: torch.Tensor, bin_ids: torch.Tensor) -> torch.Tensor:
    return torch.where(bin_ids > 0, cumulated.gather(1, (bin_ids - 1).clamp(min=0)), 0.0)
