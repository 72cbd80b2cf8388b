"""Segment: one request's part of a step in one attention group: its rows, its blocks, and the keys that it reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, SlidingWindow


@dataclass(frozen=True)
class Segment:
    """Tokens *start* to *end* of a request, which stand in *rows* of the packed batch.

    They read keys *first_key* to *end*, which are in the blocks of *table*. Masks and rows, which only gathering needs,
    are made when they are asked for, once a step: a mask for 4k tokens after 128k is half a gigabyte.
    """

    group: AttentionGroup
    rows: slice  # of the packed batch
    start: int  # position of the first of them
    first_key: int  # position of the first token in the first block of the table
    table: Sequence[int]  # device slots, from the first needed block on
    device: torch.device
    _half_rows: dict[int, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_queries(self) -> int:
        """Tokens to compute."""
        return int(self.rows.stop - self.rows.start)

    @property
    def end(self) -> int:
        """Position after the last of them."""
        return self.start + self.num_queries

    @property
    def num_keys(self) -> int:
        """Tokens in the table's blocks up to the last one of this step."""
        return self.end - self.first_key

    @property
    def reads_all_before(self) -> bool:
        """Whether each token reads every key from the first to itself, so that only later keys are masked."""
        return self.first_key >= oldest_key(self.group, self.end - 1)

    @property
    def is_causal(self) -> bool:
        """Whether queries and keys are the same tokens, and several: SDPA's own triangle is mask enough."""
        return self.num_queries > 1 and self.first_key == self.start and self.reads_all_before

    def half_rows(self, num_layers: int) -> torch.Tensor:
        """Rows of the first layer's keys, then of its values, in a slab of *num_layers*: [2 * num_blocks] int64.

        A row has one layer's keys, or values, of a block. Each further layer is 2 rows further on.
        """
        rows = self._half_rows.get(num_layers)
        if rows is None:
            key_rows = torch.tensor(self.table, dtype=torch.int64, device=self.device) * (2 * num_layers)
            rows = self._half_rows[num_layers] = torch.cat([key_rows, key_rows + 1])
        return rows

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """[num_queries, num_keys] bool, True where a query reads a key; None where `is_causal` or all is read."""
        if self.is_causal or (self.num_queries == 1 and self.reads_all_before):
            return None
        queries = torch.arange(self.start, self.end, device=self.device)[:, None]
        keys = torch.arange(self.first_key, self.end, device=self.device)[None, :]
        return reads(self.group, queries, keys)


def segment(
    group: AttentionGroup, table: Sequence[int], rows: slice, start: int, num_tokens: int, device: torch.device
) -> Segment:
    """The segment of a request whose tokens *start* to *start* + *num_tokens* are computed in this step."""
    first_block = group.first_needed(start)
    needed = table[first_block : -(-(start + num_tokens) // group.block_size)]
    return Segment(group, rows, start, first_block * group.block_size, needed, device)


def reads(group: AttentionGroup, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Where a query at a position of *queries* reads the key at a position of *keys*, both broadcast: bool."""
    mask = keys <= queries
    match group:
        case SlidingWindow(window_tokens=window):
            mask &= keys > queries - window
        case ChunkedLocal(chunk_tokens=chunk):
            mask &= keys >= queries // chunk * chunk
    return mask


def oldest_key(group: AttentionGroup, position: int) -> int:
    """The first token that the token at *position* reads."""
    match group:
        case SlidingWindow(window_tokens=window):
            return max(0, position - window + 1)
        case ChunkedLocal(chunk_tokens=chunk):
            return position // chunk * chunk
        case _:
            return 0
