"""CpuAttention: attention on a CPU over the blocks where they lie; requests that decode as rows, prompts as chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvtier.engine.model.cpu.chunk_attention import ChunkAttention, Chunks
from kvtier.engine.model.cpu.kernel_threads import KernelThreads
from kvtier.engine.model.cpu.layer import layer_of
from kvtier.engine.model.cpu.row_attention import RowAttention, Rows
from kvtier.engine.model.fast_path import TOLERANCE, share_of_largest, works
from kvtier.engine.model.paged_choice import Shape
from kvtier.engine.model.paged_gather import Scoring, Scratch, attend_gathered
from kvtier.engine.model.paged_segment import Segment, segment

NUM_LAYERS, LAYER = 2, 1
ROWS = ((0, 1), (30, 1), (200, 1))  # tokens before each segment, and its own
CHUNKS = ((0, 3), (130, 70))  # over more keys and tokens than the kernel takes at a time


def rows_error(rows: RowAttention, shape: Shape) -> float:
    """Return the largest error of the kernel for single tokens, as a share of the largest value."""
    parts, slab, query, scoring, expected = _sample(shape, ROWS)
    floats = torch.empty_like(expected)
    plan = rows.plan(parts, NUM_LAYERS, shape.num_heads, shape.head_dim)
    rows.attend(layer_of(query, slab, LAYER, scoring, floats), plan)
    return share_of_largest(floats, expected)


def chunks_error(chunks: ChunkAttention, shape: Shape) -> float:
    """Return the largest error of the kernel for chunks of prompts, as a share of the largest value."""
    parts, slab, query, scoring, expected = _sample(shape, CHUNKS)
    floats = torch.empty_like(expected)
    plan = chunks.plan(parts, NUM_LAYERS, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    chunks.attend(layer_of(query, slab, LAYER, scoring, floats), plan)
    return share_of_largest(floats, expected)


def _sample(
    shape: Shape, spans: Sequence[tuple[int, int]]
) -> tuple[list[Segment], torch.Tensor, torch.Tensor, Scoring, torch.Tensor]:
    """Return segments, their slab, queries and scoring, and the output of gathered attention in float32."""
    random = torch.Generator().manual_seed(7)  # the process's own must not move: a load draws the same numbers
    size, parts, row, slots = shape.group.block_size, [], 0, 0
    for start, num_tokens in spans:
        num_blocks = -(-(start + num_tokens) // size)
        table = list(range(slots, slots + num_blocks))[::-1]
        parts.append(segment(shape.group, table, slice(row, row + num_tokens), start, num_tokens, shape.device))
        row, slots = row + num_tokens, slots + num_blocks
    sizes = (slots, NUM_LAYERS, 2, size, shape.num_kv_heads, shape.head_dim)
    slab = torch.randn(sizes, generator=random).to(shape.dtype)
    query = torch.randn(1, row, shape.num_heads, shape.head_dim, generator=random).to(shape.dtype).transpose(1, 2)
    sinks = torch.linspace(-1, 1, shape.num_heads) if shape.has_sinks else None
    scoring = Scoring(shape.head_dim**-0.5, 30.0 if shape.has_softcap else None, sinks)
    expected = torch.empty(row, shape.num_heads, shape.head_dim)
    attend_gathered(query.float(), slab.float(), LAYER, parts, scoring, expected, Scratch())
    return parts, slab, query, scoring, expected


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Segments of one step; serves every layer of the group."""

    tokens: torch.Tensor  # [num_planned] int64: their places in the packed batch
    rows: Rows | None
    chunks: Chunks | None


class CpuAttention:
    """Computes segments; used by one thread. What a token's sums are depends on no other request, and on no thread."""

    def __init__(self, threads: KernelThreads) -> None:
        self._rows = RowAttention(threads)
        self._chunks = ChunkAttention(threads)

    def split(self, parts: Sequence[Segment], shape: Shape) -> tuple[list[Segment], list[Segment]]:
        """Return the segments of *parts* that are computed here, and those that must be gathered.

        A kernel that fails or differs on this machine takes none; each is tried once in a process for each shape.
        """
        takes_rows, takes_chunks = self._takes_rows(shape), self._takes_chunks(shape)
        here: list[Segment] = []
        gathered: list[Segment] = []
        for part in parts:
            (here if (takes_rows if part.num_queries == 1 else takes_chunks) else gathered).append(part)
        return here, gathered

    def plan(
        self, parts: Sequence[Segment], num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> CpuPlan:
        """The plan of *parts*, at least one, all supported, in a slab of *num_layers*."""
        rows = [part for part in parts if part.num_queries == 1]
        chunks = [part for part in parts if part.num_queries > 1]
        return CpuPlan(
            torch.cat([torch.arange(part.rows.start, part.rows.stop) for part in parts]),
            self._rows.plan(rows, num_layers, num_heads, head_dim) if rows else None,
            self._chunks.plan(chunks, num_layers, num_heads, num_kv_heads, head_dim) if chunks else None,
        )

    def attend(
        self,
        query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]; all requests' tokens one after the other
        slab: torch.Tensor,  # [num_slots, group_layers, 2, block_size, num_kv_heads, head_dim], contiguous
        layer: int,
        plan: CpuPlan,
        scoring: Scoring,
        output: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    ) -> None:
        """Attend the plan's segments and write their rows of *output*."""
        floats = output if output.dtype == torch.float32 else torch.empty_like(output, dtype=torch.float32)
        of_layer = layer_of(query, slab, layer, scoring, floats)
        if plan.chunks is not None:
            self._chunks.attend(of_layer, plan.chunks)
        if plan.rows is not None:
            self._rows.attend(of_layer, plan.rows)
        if floats is not output:
            output[plan.tokens] = floats[plan.tokens].to(output.dtype)

    def _takes_rows(self, shape: Shape) -> bool:
        error = partial(rows_error, self._rows, shape)
        return self._rows.supports(shape) and works("attention of single tokens", shape, error, TOLERANCE[shape.dtype])

    def _takes_chunks(self, shape: Shape) -> bool:
        error = partial(chunks_error, self._chunks, shape)
        return self._chunks.supports(shape) and works("attention of prompts", shape, error, TOLERANCE[shape.dtype])
