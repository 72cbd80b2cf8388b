"""Attention of requests that compute one token each, on a CPU: all of a step at once, over the blocks where they are.

A gather for each request and layer reads every key and value, writes it and reads it again. `row_kernel` reads it once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from kvtier.engine.model.cpu.kernel_threads import KernelThreads
from kvtier.engine.model.cpu.layer import Layer
from kvtier.engine.model.paged_choice import Shape
from kvtier.engine.model.paged_segment import Segment, oldest_key

DTYPES = (torch.float32, torch.bfloat16)  # float16 has no arithmetic in Numba on a CPU
WORTH_A_THREAD = 1 << 20  # keys times query heads times their length: 0.1 ms, ten times what handing it over takes


@dataclass(frozen=True, slots=True)
class Piece:
    """What one thread computes: so many query heads of so many rows."""

    rows: slice
    heads: tuple[int, int]  # the first, and the one after the last


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's rows, as the kernel reads them; serves every layer of the group."""

    # [num_rows, 4] int64: a row's token in the batch, where its blocks begin, its first key's place there, its keys
    spans: np.ndarray
    blocks: np.ndarray  # int64: where each block's first layer has its keys, in halves of a layer
    pieces: tuple[Piece, ...]


class RowAttention:
    """Computes rows; used by one thread. A row's sums are the same in any batch and with any number of threads."""

    def __init__(self, threads: KernelThreads) -> None:
        self._threads = threads

    def supports(self, shape: Shape) -> bool:
        """Return whether the kernel is made for layers of this shape."""
        return shape.device.type == "cpu" and shape.dtype in DTYPES

    def plan(self, parts: Sequence[Segment], num_layers: int, num_heads: int, head_dim: int) -> Rows:
        """The rows of *parts*, which have one token each, in a slab of *num_layers*."""
        firsts = [oldest_key(part.group, part.start) - part.first_key for part in parts]
        num_keys = [part.num_keys - first for part, first in zip(parts, firsts, strict=True)]
        begins = np.cumsum([0, *(len(part.table) for part in parts[:-1])])
        slots = np.concatenate([np.asarray(part.table, np.int64) for part in parts])
        num_threads = self._threads.worth(sum(num_keys) * num_heads * head_dim, WORTH_A_THREAD)
        pieces = _pieces(np.array(num_keys), num_heads, num_threads)
        tokens = [part.rows.start for part in parts]
        return Rows(np.stack([tokens, begins, firsts, num_keys], axis=1), slots * (2 * num_layers), pieces)

    def attend(self, layer: Layer, rows: Rows) -> None:
        """Attend *rows* and write their tokens of the layer's output."""
        from kvtier.engine.model.cpu.row_kernel import attend_rows

        def attend(piece: Piece) -> None:
            attend_rows(
                layer.queries, layer.halves, rows.spans[piece.rows], rows.blocks, layer.number, piece.heads,
                layer.scale, layer.softcap, layer.sinks, layer.output,
            )  # fmt: skip

        self._threads.run([partial(attend, piece) for piece in rows.pieces])


def _pieces(num_keys: np.ndarray, num_heads: int, num_threads: int) -> tuple[Piece, ...]:
    """Cut rows into one piece for each thread, of about as many keys; where rows are fewer, each by its heads."""
    num_rows = len(num_keys)
    head_cuts = np.linspace(0, num_heads, 1 + min(num_heads, -(-num_threads // num_rows)), dtype=int).tolist()
    ends = np.cumsum(num_keys)
    shares = np.linspace(0, ends[-1], 1 + min(num_threads, num_rows))[1:-1]
    row_cuts = sorted({0, *(np.searchsorted(ends, shares) + 1).tolist(), num_rows})
    return tuple(Piece(slice(*rows), heads) for rows in pairwise(row_cuts) for heads in pairwise(head_cuts))
