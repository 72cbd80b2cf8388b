"""Attention of rows, in place on a CPU: the same as over gathered blocks, whatever else is in the batch."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from paged_batches import attended, slab_of

from kvtier.engine.model.cpu.cpu_attention import CpuAttention
from kvtier.engine.model.cpu.kernel_threads import KernelThreads
from kvtier.engine.model.cpu.row_attention import WORTH_A_THREAD, RowAttention
from kvtier.engine.model.paged_choice import Shape
from kvtier.engine.model.paged_gather import Scoring, Scratch, attend_gathered
from kvtier.engine.model.paged_segment import Segment, segment
from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow

CPU = torch.device("cpu")
NUM_SLOTS, NUM_LAYERS, SIZE, NUM_KV_HEADS, HEAD_DIM, NUM_HEADS = 120, 3, 4, 2, 8, 6
STARTS = [0, 1, 3, 9, 26, 30, 77]  # tokens before each row's own
SLAB = (NUM_SLOTS, NUM_LAYERS, SIZE, NUM_KV_HEADS, HEAD_DIM)
KINDS = [FullAttention(SIZE), SlidingWindow(SIZE, 9), ChunkedLocal(SIZE, 12)]
SCORINGS = [Scoring(0.3), Scoring(0.3, 5.0), Scoring(0.3, None, torch.linspace(-2, 2, NUM_HEADS))]


def rows(group: AttentionGroup, starts: Sequence[int] = STARTS) -> list[Segment]:
    """One token of each request, its blocks all over the slab."""
    slots = iter(random.Random(1).sample(range(NUM_SLOTS), NUM_SLOTS))
    tables = [[next(slots) for _ in range(start // SIZE + 1)] for start in starts]
    return [
        segment(group, table, slice(row, row + 1), start, 1, CPU)
        for row, (table, start) in enumerate(zip(tables, starts, strict=True))
    ]


@pytest.mark.parametrize("group", KINDS, ids=["full", "sliding", "chunked"])
@pytest.mark.parametrize("scoring", SCORINGS, ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=["float32", "bfloat16"])
def test_rows_read_what_a_gather_would_copy(
    group: AttentionGroup, scoring: Scoring, dtype: torch.dtype, off: float
) -> None:
    segments = rows(group)
    slab = slab_of(segments, SLAB, dtype)
    query = torch.randn(1, NUM_HEADS, len(segments), HEAD_DIM, dtype=dtype)
    for layer in range(NUM_LAYERS):
        expected = torch.empty(len(segments), NUM_HEADS, HEAD_DIM, dtype=dtype)
        attend_gathered(query, slab, layer, segments, scoring, expected, Scratch())

        assert torch.allclose(attended(segments, query, slab, layer, scoring, 1), expected, atol=off)


@pytest.mark.parametrize("scoring", SCORINGS, ids=["plain", "softcap", "sinks"])
def test_a_row_is_the_same_number_for_number_alone_in_a_batch_and_on_any_threads(scoring: Scoring) -> None:
    group = FullAttention(SIZE)
    segments = rows(group)
    slab = slab_of(segments, SLAB, torch.float32)
    query = torch.randn(1, NUM_HEADS, len(segments), HEAD_DIM)
    together = attended(segments, query, slab, 1, scoring, 1)

    for row, part in enumerate(segments):
        alone = segment(group, part.table, slice(0, 1), part.start, 1, CPU)
        assert torch.equal(attended([alone], query[:, :, row : row + 1], slab, 1, scoring, 1)[0], together[row])


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_share_rows_or_the_heads_of_few_and_change_no_number(num_rows: int, num_threads: int) -> None:
    num_heads, num_kv_heads, head_dim, length = 8, 4, 64, 8 * WORTH_A_THREAD // (8 * 64)
    num_blocks = -(-length // 64)
    slab = torch.randn(num_blocks, 1, 2, 64, num_kv_heads, head_dim)
    group, table = FullAttention(64), list(range(num_blocks))
    segments = [segment(group, table, slice(row, row + 1), length - 1 - row, 1, CPU) for row in range(num_rows)]
    query = torch.randn(1, num_heads, num_rows, head_dim)
    outputs = []
    for threads in (1, num_threads):
        kernel_threads = KernelThreads(threads)
        attention = CpuAttention(kernel_threads)
        plan = attention.plan(segments, 1, num_heads, num_kv_heads, head_dim)
        outputs.append(torch.full((num_rows, num_heads, head_dim), float("nan")))
        attention.attend(query, slab, 0, plan, Scoring(0.1), outputs[-1])
        kernel_threads.close()
        assert plan.rows is not None
        assert len(plan.rows.pieces) >= threads

    assert torch.equal(*outputs)


def test_types_without_arithmetic_are_left_to_a_gather() -> None:
    attention = RowAttention(KernelThreads(1))
    shape = Shape(CPU, torch.float32, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, FullAttention(SIZE), False, False)

    assert attention.supports(shape)
    assert not attention.supports(replace(shape, dtype=torch.float16))
