"""Batches of attention over blocks, for tests of kernels on a CPU: a slab with what is read, and what comes of it."""

from collections.abc import Sequence

import torch

from kvtier.engine.model.cpu.cpu_attention import CpuAttention
from kvtier.engine.model.cpu.kernel_threads import KernelThreads
from kvtier.engine.model.paged_gather import Scoring
from kvtier.engine.model.paged_segment import Segment


def slab_of(segments: Sequence[Segment], shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Keys and values where the segments' requests have them, and no numbers anywhere else. *shape*: slots, layers,
    block size, heads of keys, their length."""
    num_slots, num_layers, block_size, num_kv_heads, head_dim = shape
    slab = torch.full((num_slots, num_layers, 2, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    for part in segments:
        for position in range(part.first_key, part.end):
            slot = part.table[(position - part.first_key) // block_size]
            slab[slot, :, :, position % block_size] = torch.randn(num_layers, 2, num_kv_heads, head_dim, dtype=dtype)
    return slab


def attended(
    segments: Sequence[Segment],
    query: torch.Tensor,
    slab: torch.Tensor,
    layer: int,
    scoring: Scoring,
    num_threads: int = 1,
) -> torch.Tensor:
    """What `CpuAttention` makes of the segments: [num_tokens, num_heads, head_dim]."""
    threads = KernelThreads(num_threads)
    attention = CpuAttention(threads)
    _, num_heads, num_tokens, head_dim = query.shape
    output = torch.full((num_tokens, num_heads, head_dim), float("nan"), dtype=query.dtype)
    plan = attention.plan(segments, slab.shape[1], num_heads, slab.shape[4], head_dim)
    attention.attend(query, slab, layer, plan, scoring, output)
    threads.close()
    return output
