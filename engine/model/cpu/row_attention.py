"""RowAttention: attention of single tokens on a CPU, which reads keys and values without copying their KV blocks.

A request that decodes computes one token per step. This token is called a *row*. The kernel in `row_kernel` reads each
block once. The alternative, gathering, first copies the blocks of each request in each layer and then reads the copy.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from kvtier.engine.model.fast_path import TOLERANCE, share_of_largest, works
from kvtier.engine.model.paged_choice import Shape
from kvtier.engine.model.paged_gather import Scoring, Scratch, attend_gathered
from kvtier.engine.model.paged_segment import Segment, oldest_key, segment

DTYPES = (torch.float32, torch.bfloat16)  # Numba has no float16 arithmetic on a CPU
# Minimum work of a thread, in keys times query heads times head_dim. This much takes 0.1 ms, ten times as long as it
# takes to start it in another thread.
MIN_WORK_PER_THREAD = 1 << 20
# The sample that the kernel is tried with: the number of tokens before each row's token, the number of layers in the
# slab, and the layer that is computed.
SAMPLE_STARTS = (0, 30, 200)
NUM_SAMPLE_LAYERS, SAMPLE_LAYER = 2, 1


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a step's attention that a thread computes: some query heads of some rows (single tokens)."""

    rows: slice
    heads: tuple[int, int]  # the first head, and the one after the last


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The input of the kernel `attend_rows` in a step: a row for each request that computes a single token.

    All layers of an attention group use the same plan.
    """

    # [num_rows, 4] int64: the row's token in the packed batch, the index of its first block in `blocks`, the offset of
    # its first key in that block, its number of keys
    spans: np.ndarray
    blocks: np.ndarray  # int64: for each block, the half of the slab that has its keys in the group's first layer
    pieces: tuple[Piece, ...]


class RowAttention:
    """The attention of requests that compute a single token in a step, as in decoding. Such a token is called a row.

    `split` selects the rows of a step, `plan` prepares them, and `attend` computes one layer. This object owns a thread
    pool until it is closed. Only one thread may call its methods. The result of a row depends neither on the other rows
    nor on the number of threads.
    """

    def __init__(self, num_threads: int) -> None:
        """Create the attention for *num_threads* threads, including the calling one."""
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(max(1, num_threads - 1), "kvtier-kernels")  # starts threads on first use

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def split(self, segments: Sequence[Segment], shape: Shape) -> tuple[list[Segment], list[Segment]]:
        """Return the segments that are computed as rows, and all other segments.

        Segments with one query are rows, unless the kernel does not support *shape* or does not work on this machine.
        The kernel is tried once per process for each shape.
        """
        is_usable = self._is_usable(shape)
        rows: list[Segment] = []
        others: list[Segment] = []
        for part in segments:
            (rows if is_usable and part.num_queries == 1 else others).append(part)
        return rows, others

    def plan(self, segments: Sequence[Segment], num_layers: int, num_heads: int, head_dim: int) -> RowPlan:
        """Return the plan of one or more *segments*, which have one query each.

        *num_layers* is the number of layers in the slab, the tensor with the group's KV blocks.
        """
        firsts = [oldest_key(part.group, part.start) - part.first_key for part in segments]
        num_keys = [part.num_keys - first for part, first in zip(segments, firsts, strict=True)]
        first_blocks = np.cumsum([0, *(len(part.table) for part in segments[:-1])])
        slots = np.concatenate([np.asarray(part.table, np.int64) for part in segments])
        work = sum(num_keys) * num_heads * head_dim
        num_threads = max(1, min(self._num_threads, work // MIN_WORK_PER_THREAD))
        pieces = _pieces(np.array(num_keys), num_heads, num_threads)
        tokens = [part.rows.start for part in segments]
        return RowPlan(np.stack([tokens, first_blocks, firsts, num_keys], axis=1), slots * (2 * num_layers), pieces)

    def attend(
        self,
        query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]; all requests' tokens one after the other
        slab: torch.Tensor,  # [num_slots, group_layers, 2, block_size, num_kv_heads, head_dim], contiguous
        layer: int,
        plan: RowPlan,
        scoring: Scoring,
        output: torch.Tensor,  # [num_tokens, num_heads, head_dim], contiguous
    ) -> None:
        """Write one layer's attention of the plan's tokens to *output*. Other tokens in *output* stay unchanged."""
        from kvtier.engine.model.cpu.row_kernel import attend_rows

        floats = output if output.dtype == torch.float32 else torch.empty_like(output, dtype=torch.float32)
        bits = slab if slab.dtype == torch.float32 else slab.view(torch.uint16)  # NumPy has no bfloat16
        queries = query[0].transpose(0, 1).float().contiguous().numpy()
        halves = bits.view(-1, *slab.shape[3:]).numpy()
        sinks = np.empty(0, np.float32) if scoring.sinks is None else scoring.sinks.detach().float().numpy()
        attended = floats.numpy()

        def attend(piece: Piece) -> None:
            attend_rows(
                queries, halves, plan.spans[piece.rows], plan.blocks, layer, piece.heads,
                scoring.scale, scoring.softcap or 0.0, sinks, attended,
            )  # fmt: skip

        first, *others = plan.pieces
        in_flight = [self._pool.submit(attend, piece) for piece in others]
        attend(first)
        for future in in_flight:
            future.result()
        if floats is not output:
            tokens = torch.from_numpy(plan.spans[:, 0])
            output[tokens] = floats[tokens].to(output.dtype)

    def _is_usable(self, shape: Shape) -> bool:
        if shape.device.type != "cpu" or shape.dtype not in DTYPES:
            return False
        return works("attention of single tokens", shape, partial(self._error, shape), TOLERANCE[shape.dtype])

    def _error(self, shape: Shape) -> float:
        """Return the kernel's largest difference from `attend_gathered`, as a fraction of the largest output value."""
        # A separate generator, because a model that is being loaded may draw its weights from torch's global one.
        random = torch.Generator().manual_seed(7)
        num_heads, head_dim, size = shape.num_heads, shape.head_dim, shape.group.block_size
        segments: list[Segment] = []
        num_slots = 0
        for row, start in enumerate(SAMPLE_STARTS):
            num_blocks = start // size + 1
            table = list(range(num_slots, num_slots + num_blocks))[::-1]
            segments.append(segment(shape.group, table, slice(row, row + 1), start, 1, shape.device))
            num_slots += num_blocks
        sizes = (num_slots, NUM_SAMPLE_LAYERS, 2, size, shape.num_kv_heads, head_dim)
        slab = torch.randn(sizes, generator=random).to(shape.dtype)
        query = torch.randn(1, len(segments), num_heads, head_dim, generator=random).to(shape.dtype).transpose(1, 2)
        sinks = torch.linspace(-1, 1, num_heads) if shape.has_sinks else None
        scoring = Scoring(head_dim**-0.5, 30.0 if shape.has_softcap else None, sinks)
        expected = torch.empty(len(segments), num_heads, head_dim)
        attend_gathered(query.float(), slab.float(), SAMPLE_LAYER, segments, scoring, expected, Scratch())
        output = torch.empty_like(expected)
        plan = self.plan(segments, NUM_SAMPLE_LAYERS, num_heads, head_dim)
        self.attend(query, slab, SAMPLE_LAYER, plan, scoring, output)
        return share_of_largest(output, expected)


def _pieces(num_keys: np.ndarray, num_heads: int, num_threads: int) -> tuple[Piece, ...]:
    """Divide rows, each the single token of a request, into one piece per thread, with about equally many keys.

    *num_keys* has the number of keys that each row reads. If there are fewer rows than threads, divide the heads of
    each row among threads too.
    """
    num_rows = len(num_keys)
    head_cuts = np.linspace(0, num_heads, 1 + min(num_heads, -(-num_threads // num_rows)), dtype=int).tolist()
    ends = np.cumsum(num_keys)
    shares = np.linspace(0, ends[-1], 1 + min(num_threads, num_rows))[1:-1]
    row_cuts = sorted({0, *(np.searchsorted(ends, shares) + 1).tolist(), num_rows})
    return tuple(Piece(slice(*rows), heads) for rows in pairwise(row_cuts) for heads in pairwise(head_cuts))
