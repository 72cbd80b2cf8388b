"""Attention of rows, in place on a CPU: the same as over gathered blocks, whatever else is in the batch."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kvtier.engine.model import fast_path
from kvtier.engine.model.cpu.row_attention import MIN_WORK_PER_THREAD, RowAttention
from kvtier.engine.model.paged_choice import Shape
from kvtier.engine.model.paged_gather import Scoring, Scratch, attend_gathered
from kvtier.engine.model.paged_segment import Segment, segment
from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow

CPU = torch.device("cpu")
NUM_SLOTS, NUM_LAYERS, SIZE, NUM_KV_HEADS, HEAD_DIM, NUM_HEADS = 120, 3, 4, 2, 8, 6
STARTS = [0, 1, 3, 9, 26, 30, 77]  # tokens before each row's own
MIXED = [(0, 20), (33, 1), (9, 4), (5, 1)]  # tokens before each request's own, and its own
FULL = FullAttention(SIZE)
KINDS = [FULL, SlidingWindow(SIZE, 9), ChunkedLocal(SIZE, 12)]
SCORINGS = [Scoring(0.3), Scoring(0.3, 5.0), Scoring(0.3, None, torch.linspace(-2, 2, NUM_HEADS))]
SHAPE = Shape(CPU, torch.float32, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, FULL, has_softcap=False, has_sinks=False)
BY_DTYPE = pytest.mark.parametrize(
    ("dtype", "off"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=["float32", "bfloat16"]
)


def batch(group: AttentionGroup, spans: Sequence[tuple[int, int]]) -> list[Segment]:
    """Requests one after the other in a batch, their blocks all over the slab."""
    slots = iter(random.Random(1).sample(range(NUM_SLOTS), NUM_SLOTS))
    segments, row = [], 0
    for start, num_tokens in spans:
        table = [next(slots) for _ in range(-(-(start + num_tokens) // SIZE))]
        segments.append(segment(group, table, slice(row, row + num_tokens), start, num_tokens, CPU))
        row += num_tokens
    return segments


def rows(group: AttentionGroup) -> list[Segment]:
    """One token of each request."""
    return batch(group, [(start, 1) for start in STARTS])


def slab_of(segments: Sequence[Segment], dtype: torch.dtype) -> torch.Tensor:
    """Keys and values where the requests have them, and NaN anywhere else."""
    slab = torch.full((NUM_SLOTS, NUM_LAYERS, 2, SIZE, NUM_KV_HEADS, HEAD_DIM), float("nan"), dtype=dtype)
    for part in segments:
        for position in range(part.first_key, part.end):
            slot = part.table[(position - part.first_key) // SIZE]
            slab[slot, :, :, position % SIZE] = torch.randn(NUM_LAYERS, 2, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    return slab


def attended(
    segments: Sequence[Segment], query: torch.Tensor, slab: torch.Tensor, layer: int, scoring: Scoring
) -> torch.Tensor:
    """The attention of the segments by one thread, [num_tokens, num_heads, head_dim]; NaN for other tokens."""
    attention = RowAttention(1)
    _, num_heads, num_tokens, head_dim = query.shape
    output = torch.full((num_tokens, num_heads, head_dim), float("nan"), dtype=query.dtype)
    plan = attention.plan(segments, slab.shape[1], num_heads, head_dim)
    attention.attend(query, slab, layer, plan, scoring, output)
    attention.close()
    return output


@pytest.mark.parametrize("group", KINDS, ids=["full", "sliding", "chunked"])
@pytest.mark.parametrize("scoring", SCORINGS, ids=["plain", "softcap", "sinks"])
@BY_DTYPE
def test_rows_read_what_a_gather_would_copy(
    group: AttentionGroup, scoring: Scoring, dtype: torch.dtype, off: float
) -> None:
    segments = rows(group)
    slab = slab_of(segments, dtype)
    query = torch.randn(1, NUM_HEADS, len(segments), HEAD_DIM, dtype=dtype)
    for layer in range(NUM_LAYERS):
        expected = torch.empty(len(segments), NUM_HEADS, HEAD_DIM, dtype=dtype)
        attend_gathered(query, slab, layer, segments, scoring, expected, Scratch())

        assert torch.allclose(attended(segments, query, slab, layer, scoring), expected, atol=off)


@pytest.mark.parametrize("scoring", SCORINGS, ids=["plain", "softcap", "sinks"])
def test_a_row_is_the_same_number_for_number_alone_and_in_a_batch(scoring: Scoring) -> None:
    segments = rows(FULL)
    slab = slab_of(segments, torch.float32)
    query = torch.randn(1, NUM_HEADS, len(segments), HEAD_DIM)
    together = attended(segments, query, slab, 1, scoring)

    for row, part in enumerate(segments):
        alone = segment(FULL, part.table, slice(0, 1), part.start, 1, CPU)
        assert torch.equal(attended([alone], query[:, :, row : row + 1], slab, 1, scoring)[0], together[row])


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_share_rows_or_the_heads_of_few_and_change_no_number(num_rows: int, num_threads: int) -> None:
    num_heads, num_kv_heads, head_dim, length = 8, 4, 64, 8 * MIN_WORK_PER_THREAD // (8 * 64)
    num_blocks = -(-length // 64)
    slab = torch.randn(num_blocks, 1, 2, 64, num_kv_heads, head_dim)
    group, table = FullAttention(64), list(range(num_blocks))
    segments = [segment(group, table, slice(row, row + 1), length - 1 - row, 1, CPU) for row in range(num_rows)]
    query = torch.randn(1, num_heads, num_rows, head_dim)
    outputs = []
    for threads in (1, num_threads):
        attention = RowAttention(threads)
        plan = attention.plan(segments, 1, num_heads, head_dim)
        outputs.append(torch.full((num_rows, num_heads, head_dim), float("nan")))
        attention.attend(query, slab, 0, plan, Scoring(0.1), outputs[-1])
        attention.close()
        assert len(plan.pieces) >= threads

    assert torch.equal(*outputs)


@BY_DTYPE
def test_among_prompts_single_tokens_are_written_and_no_token_of_a_prompt(
    dtype: torch.dtype, off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(fast_path.SWITCH, raising=False)
    segments = batch(FULL, MIXED)
    slab = slab_of(segments, dtype)
    query = torch.randn(1, segments[-1].rows.stop, NUM_HEADS, HEAD_DIM, dtype=dtype).transpose(1, 2)
    expected = torch.full((query.shape[2], NUM_HEADS, HEAD_DIM), 7.0)
    output = expected.to(dtype)

    attention = RowAttention(2)
    single, prompts = attention.split(segments, replace(SHAPE, dtype=dtype))
    attend_gathered(query.float(), slab.float(), 0, single, Scoring(0.3), expected, Scratch())
    attention.attend(query, slab, 0, attention.plan(single, NUM_LAYERS, NUM_HEADS, HEAD_DIM), Scoring(0.3), output)
    attention.close()

    assert (single, prompts) == (segments[1::2], segments[::2])
    assert torch.allclose(output.float(), expected, atol=off)


def test_a_dtype_without_arithmetic_is_left_to_a_gather() -> None:
    attention, segments = RowAttention(1), rows(FULL)

    assert attention.split(segments, replace(SHAPE, dtype=torch.float16)) == ([], segments)
    attention.close()
