"""CpuAttention: attention on a CPU over the blocks where they lie; requests that decode as rows, prompts as chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvtier.engine.model.cpu.chunk_attention import ChunkAttention, Chunks
from kvtier.engine.model.cpu.kernel_check import chunks_error, rows_error
from kvtier.engine.model.cpu.kernel_threads import KernelThreads
from kvtier.engine.model.cpu.layer import layer_of
from kvtier.engine.model.cpu.row_attention import RowAttention, Rows
from kvtier.engine.model.fast_path import TOLERANCE, works
from kvtier.engine.model.paged_choice import Shape
from kvtier.engine.model.paged_gather import Scoring
from kvtier.engine.model.paged_segment import Segment


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
