"""Attention of chunks, in place on a CPU: the same as over gathered blocks, whatever else is in the batch."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from paged_batches import attended, slab_of

from kvtier.engine.model.cpu import chunk_attention
from kvtier.engine.model.cpu.chunk_attention import ChunkAttention
from kvtier.engine.model.cpu.kernel_threads import KernelThreads
from kvtier.engine.model.paged_choice import Shape
from kvtier.engine.model.paged_gather import Scoring, Scratch, attend_gathered
from kvtier.engine.model.paged_segment import Segment, segment
from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow

CPU = torch.device("cpu")
NUM_SLOTS, NUM_LAYERS, SIZE, NUM_KV_HEADS, HEAD_DIM, NUM_HEADS = 160, 3, 8, 2, 32, 6
SPANS = [(0, 2), (0, 50), (13, 64), (130, 3), (120, 200), (255, 130)]  # tokens before each chunk, and its own
SLAB = (NUM_SLOTS, NUM_LAYERS, SIZE, NUM_KV_HEADS, HEAD_DIM)
KINDS = [FullAttention(SIZE), SlidingWindow(SIZE, 19), SlidingWindow(SIZE, 150), ChunkedLocal(SIZE, 72)]
SCORINGS = [Scoring(0.3), Scoring(0.3, 5.0), Scoring(0.3, None, torch.linspace(-2, 2, NUM_HEADS))]


def chunks(group: AttentionGroup, spans: Sequence[tuple[int, int]] = SPANS) -> list[Segment]:
    """The chunks of requests one after the other in a batch, their blocks all over the slab."""
    slots = iter(random.Random(1).sample(range(NUM_SLOTS), NUM_SLOTS))
    segments, row = [], 0
    for start, num_tokens in spans:
        table = [next(slots) for _ in range(-(-(start + num_tokens) // SIZE))]
        segments.append(segment(group, table, slice(row, row + num_tokens), start, num_tokens, CPU))
        row += num_tokens
    return segments


def queries_of(segments: Sequence[Segment], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1, segments[-1].rows.stop, NUM_HEADS, HEAD_DIM, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize("group", KINDS, ids=["full", "sliding", "sliding far", "chunked"])
@pytest.mark.parametrize("scoring", SCORINGS, ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=["float32", "bfloat16"])
def test_chunks_read_what_a_gather_would_copy(
    group: AttentionGroup, scoring: Scoring, dtype: torch.dtype, off: float
) -> None:
    segments = chunks(group)
    slab, query = slab_of(segments, SLAB, dtype), queries_of(segments, dtype)
    expected = torch.empty(query.shape[2], NUM_HEADS, HEAD_DIM)
    for layer in range(NUM_LAYERS):
        attend_gathered(query.float(), slab.float(), layer, segments, scoring, expected, Scratch())

        assert torch.allclose(attended(segments, query, slab, layer, scoring).float(), expected, atol=off)


def test_scores_beyond_what_an_exponential_can_hold_are_weighed_as_by_a_gather() -> None:
    segments = chunks(FullAttention(SIZE))
    slab, query = slab_of(segments, SLAB, torch.float32), 40 * queries_of(segments)
    expected = torch.empty(query.shape[2], NUM_HEADS, HEAD_DIM)
    attend_gathered(query, slab, 0, segments, Scoring(3.0), expected, Scratch())

    assert torch.allclose(attended(segments, query, slab, 0, Scoring(3.0)), expected, atol=1e-3)


def test_no_number_among_the_keys_that_are_read_is_none_in_the_answer() -> None:
    segments = chunks(FullAttention(SIZE), [(0, 50)])
    slab, query = slab_of(segments, SLAB, torch.float32), queries_of(segments)
    slab[segments[0].table[20 // SIZE], 1, 0, 20 % SIZE] = float("nan")

    output = attended(segments, query, slab, 1, Scoring(0.3))

    assert output[:20].isfinite().all()
    assert output[20:].isnan().all()


@pytest.mark.parametrize("scoring", SCORINGS, ids=["plain", "softcap", "sinks"])
def test_a_token_is_the_same_number_for_number_alone_in_smaller_chunks_and_on_any_threads(
    scoring: Scoring, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = FullAttention(SIZE)
    segments = chunks(group)
    slab, query = slab_of(segments, SLAB, torch.float32), queries_of(segments)
    together = attended(segments, query, slab, 1, scoring)

    for part in segments:
        for begin in range(0, part.num_queries, 37):
            end = min(part.num_queries, begin + 37)
            rows = slice(part.rows.start + begin, part.rows.start + end)
            table = part.table[: -(-(part.start + end) // SIZE)]
            smaller = segment(group, table, slice(0, end - begin), part.start + begin, end - begin, CPU)
            if end - begin > 1:
                assert torch.equal(attended([smaller], query[:, :, rows], slab, 1, scoring), together[rows])

    monkeypatch.setattr(chunk_attention, "WORTH_A_THREAD", 1000)
    monkeypatch.setattr(chunk_attention, "MAX_TOKENS", 50)
    assert torch.equal(attended(segments, query, slab, 1, scoring, 3), together)


def test_work_is_shared_evenly_and_little_work_is_not_shared() -> None:
    attention = ChunkAttention(KernelThreads(2))
    long, short = chunks(FullAttention(SIZE), [(100, 500)]), chunks(FullAttention(SIZE), [(0, 20)])

    shares = attention.plan(long, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM).shares
    loads = [sum(piece.num_scores for piece in share) for share in shares]

    assert len(loads) == 2
    assert max(loads) <= 1.2 * min(loads)
    assert len(attention.plan(short, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM).shares) == 1


def test_types_without_arithmetic_and_odd_heads_are_left_to_others() -> None:
    attention = ChunkAttention(KernelThreads(1))
    shape = Shape(CPU, torch.float32, NUM_HEADS, NUM_KV_HEADS, 48, FullAttention(SIZE), False, False)

    assert attention.supports(shape)
    assert not attention.supports(replace(shape, head_dim=40))
    assert not attention.supports(replace(shape, dtype=torch.float16))
