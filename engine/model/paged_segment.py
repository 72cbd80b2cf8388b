"""Segment: the tokens of one request in one step, and the KV blocks that they read in one attention group."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, SlidingWindow


@dataclass(frozen=True)
class Segment:
    """The tokens of one request that a step computes, and the keys that they read in one attention group.

    The tokens have the positions *start* to *end* - 1. The batch has one row for each token of each request; *rows* are
    the rows of these tokens. The keys have the positions *first_key* to *end* - 1 and are in the blocks of *table*.

    Masks, `slots` and `half_rows` are created on first use, because only some attention code needs them. For 4k tokens
    after a prefix of 128k, `mask` takes half a GB, and `added_mask` in float32 takes 2 GB.
    """

    group: AttentionGroup
    rows: slice  # of the batch
    start: int  # position of the first token to compute
    first_key: int  # position of the first token in the first block of the table
    table: Sequence[int]  # device slots, starting with the first block that is needed
    device: torch.device
    _half_rows: dict[int, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    _added_masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

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
        """Number of keys, one per token: those of the positions *first_key* to *end* - 1."""
        return self.end - self.first_key

    @property
    def reads_all_before(self) -> bool:
        """True if each token reads all keys from *first_key* to its own, so that a mask hides only later keys."""
        return self.first_key >= oldest_key(self.group, self.end - 1)

    @property
    def is_causal(self) -> bool:
        """True if PyTorch's SDPA can use its causal mask in place of `mask`.

        That is possible if there are at least two tokens, and they read only their own and each other's keys.
        """
        return self.num_queries > 1 and self.first_key == self.start and self.reads_all_before

    @cached_property
    def slots(self) -> torch.Tensor:
        """The table as a tensor on the device, [num_blocks] int64."""
        return torch.tensor(self.table, dtype=torch.int64, device=self.device)

    def half_rows(self, num_layers: int) -> torch.Tensor:
        """Return where the table's blocks are in the slab, as row numbers for the first layer: [2 * num_blocks] int64.

        A row of the slab holds half a block in one layer: its keys or its values. The result lists the rows of all
        keys, then the rows of all values. For layer i, add 2 * i. *num_layers* is the number of layers in the slab.
        """
        rows = self._half_rows.get(num_layers)
        if rows is None:
            key_rows = self.slots * (2 * num_layers)
            rows = self._half_rows[num_layers] = torch.cat([key_rows, key_rows + 1])
        return rows

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """Mask [num_queries, num_keys], True where a query reads a key.

        None if `is_causal`, or if the segment has a single query, which reads all keys.
        """
        return None if self._needs_no_mask else self._reads()

    def added_mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return `mask` as numbers to add to the scores: 0 where a query reads a key, otherwise -inf.

        On a CPU, SDPA converts a bool mask to this form in every layer, which takes 8% of the prefill of 8k tokens.
        """
        if self._needs_no_mask:
            return None
        added = self._added_masks.get(dtype)
        if added is None:
            zeros = torch.zeros(self.num_queries, self.num_keys, dtype=dtype, device=self.device)
            added = self._added_masks[dtype] = zeros.masked_fill_(~self._reads(), float("-inf"))
        return added

    @property
    def _needs_no_mask(self) -> bool:
        return self.is_causal or (self.num_queries == 1 and self.reads_all_before)

    def _reads(self) -> torch.Tensor:
        queries = torch.arange(self.start, self.end, device=self.device)[:, None]
        keys = torch.arange(self.first_key, self.end, device=self.device)[None, :]
        return reads(self.group, queries, keys)


def segment(
    group: AttentionGroup, table: Sequence[int], rows: slice, start: int, num_tokens: int, device: torch.device
) -> Segment:
    """Return the segment of a request that computes *num_tokens* tokens from position *start* on in this step.

    *table* holds the device slots of all the request's blocks. *rows* are the tokens' rows in the batch.
    """
    first_block = group.first_needed(start)
    needed = table[first_block : -(-(start + num_tokens) // group.block_size)]
    return Segment(group, rows, start, first_block * group.block_size, needed, device)


def rows_of(kept: torch.Tensor, part: Segment) -> torch.Tensor:
    """Return the rows of a segment's keys, [num_keys, width], from *kept*, [num_slots, block_size, width]."""
    return kept[part.slots].flatten(0, 1)[: part.num_keys]


def reads(group: AttentionGroup, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor that is True where a query reads a key.

    *queries* and *keys* are positions of tokens, in shapes that can be broadcast.
    """
    mask = keys <= queries
    match group:
        case SlidingWindow(window_tokens=window):
            mask &= keys > queries - window
        case ChunkedLocal(chunk_tokens=chunk):
            mask &= keys >= queries // chunk * chunk
    return mask


def oldest_key(group: AttentionGroup, position: int) -> int:
    """Return the position of the oldest token that the token at *position* attends to."""
    match group:
        case SlidingWindow(window_tokens=window):
            return max(0, position - window + 1)
        case ChunkedLocal(chunk_tokens=chunk):
            return position // chunk * chunk
        case _:
            return 0
