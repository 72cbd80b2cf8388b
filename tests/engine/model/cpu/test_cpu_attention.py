"""CpuAttention: chunks and rows of one batch, each by its kernel; what is not planned stays as it is."""

import pytest
import torch

from kvtier.engine.model.cpu.cpu_attention import CpuAttention
from kvtier.engine.model.cpu.kernel_threads import KernelThreads
from kvtier.engine.model.paged_gather import Scoring, Scratch, attend_gathered
from kvtier.engine.model.paged_segment import segment
from kvtier.tiers.naming.groups import FullAttention

CPU = torch.device("cpu")
SIZE, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM = 8, 2, 4, 16
SPANS = [(0, 20), (33, 1), (9, 4), (5, 1)]  # tokens before each request's own, and its own


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("left_out", [None, 0, 1, 2])
def test_a_batch_of_chunks_and_rows_is_what_gathers_would_make_of_it(
    dtype: torch.dtype, off: float, left_out: int | None
) -> None:
    segments, row, block = [], 0, 0
    for start, num_tokens in SPANS:
        num_blocks = -(-(start + num_tokens) // SIZE)
        table = list(range(block, block + num_blocks))
        rows = slice(row, row + num_tokens)
        segments.append(segment(FullAttention(SIZE), table, rows, start, num_tokens, CPU))
        row, block = row + num_tokens, block + num_blocks
    slab = torch.randn(block, 1, 2, SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    query = torch.randn(1, row, NUM_HEADS, HEAD_DIM, dtype=dtype).transpose(1, 2)
    expected = torch.empty(row, NUM_HEADS, HEAD_DIM)
    attend_gathered(query.float(), slab.float(), 0, segments, Scoring(0.3), expected, Scratch())
    planned = [part for number, part in enumerate(segments) if number != left_out]
    if left_out is not None:
        expected[segments[left_out].rows] = 7.0  # by another, before

    threads = KernelThreads(2)
    attention = CpuAttention(threads)
    output = torch.full((row, NUM_HEADS, HEAD_DIM), 7.0, dtype=dtype)
    plan = attention.plan(planned, 1, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    attention.attend(query, slab, 0, plan, Scoring(0.3), output)
    threads.close()

    assert torch.allclose(output.float(), expected, atol=off)
