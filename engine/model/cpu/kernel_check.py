"""Compares the attention kernels for CPUs with gathered attention, on random keys and values of a model's own shape."""

from collections.abc import Sequence

import torch

from kvtier.engine.model.cpu.chunk_attention import ChunkAttention
from kvtier.engine.model.cpu.layer import layer_of
from kvtier.engine.model.cpu.row_attention import RowAttention
from kvtier.engine.model.fast_path import share_of_largest
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
