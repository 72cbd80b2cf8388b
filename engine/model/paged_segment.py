"""Segment: one request's part of a step in one attention group, with its rows, blocks and keys."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, SlidingWindow


@dataclass(frozen=True)
class Segment:
    """The tokens *start* to *end* - 1 of a request, which are *rows* of the packed batch.

    The tokens read the keys *first_key* to *end* - 1, which are in the blocks of *table*. Only gathering needs `mask`
    and `half_rows`, so they are created on demand, once per step. A mask for 4k tokens after 128k takes half a GB.
    """

    group: AttentionGroup
    rows: slice  # of the packed batch
    start: int  # position of the first token to compute
    first_key: int  # position of the first token in the first block of the table
    table: Sequence[int]  # device slots, starting with the first block that is needed
    device: torch.device
    _half_rows: dict[int, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_queries(self) -> int:
        """Number of tokens to compute."""
        return int(self.rows.stop - self.rows.start)

    @property
    def end(self) -> int:
        """Position after the last token to compute."""
        return self.start + self.num_queries

    @property
    def num_keys(self) -> int:
        """Number of tokens in the table's blocks, up to the last token of this step."""
        return self.end - self.first_key

    @property
    def reads_all_before(self) -> bool:
        """Whether each token reads every key from *first_key* to its own, so that only later keys are masked."""
        return self.first_key >= oldest_key(self.group, self.end - 1)

    @property
    def is_causal(self) -> bool:
        """Whether SDPA's causal mask suffices: the queries and keys belong to the same tokens, at least two."""
        return self.num_queries > 1 and self.first_key == self.start and self.reads_all_before

    def half_rows(self, num_layers: int) -> torch.Tensor:
        """Return the rows of the table's blocks in a slab of *num_layers* layers: [2 * num_blocks] int64.

        A row of the slab holds the keys, or the values, of one block in one layer. The result has the rows of keys in
        the first layer, then the rows of values. Add 2 for each further layer.
        """
        rows = self._half_rows.get(num_layers)
        if rows is None:
            key_rows = torch.tensor(self.table, dtype=torch.int64, device=self.device) * (2 * num_layers)
            rows = self._half_rows[num_layers] = torch.cat([key_rows, key_rows + 1])
        return rows

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """Mask [num_queries, num_keys], True if a query reads a key; None if `is_causal` or all keys are read."""
        if self.is_causal or (self.num_queries == 1 and self.reads_all_before):
            return None
        queries = torch.arange(self.start, self.end, device=self.device)[:, None]
        keys = torch.arange(self.first_key, self.end, device=self.device)[None, :]
        return reads(self.group, queries, keys)


def segment(
    group: AttentionGroup, table: Sequence[int], rows: slice, start: int, num_tokens: int, device: torch.device
) -> Segment:
    """Return the segment of a request that computes *num_tokens* tokens from position *start* on in this step.

    *table* holds the device slots of all the request's blocks. *rows* are the tokens' rows in the packed batch.
    """
    first_block = group.first_needed(start)
    needed = table[first_block : -(-(start + num_tokens) // group.block_size)]
    return Segment(group, rows, start, first_block * group.block_size, needed, device)


def reads(group: AttentionGroup, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor that is True where a query reads a key, given their broadcastable positions."""
    mask = keys <= queries
    match group:
        case SlidingWindow(window_tokens=window):
            mask &= keys > queries - window
        case ChunkedLocal(chunk_tokens=chunk):
            mask &= keys >= queries // chunk * chunk
    return mask


def oldest_key(group: AttentionGroup, position: int) -> int:
    """Return the position of the first token that the token at *position* reads."""
    match group:
        case SlidingWindow(window_tokens=window):
            return max(0, position - window + 1)
        case ChunkedLocal(chunk_tokens=chunk):
            return position // chunk * chunk
        case _:
            return 0
