"""Attention of rows of one token over blocks where they are: what it reads, and that nothing else changes its sums."""

import random
from collections.abc import Iterator

import pytest
import torch

from kvtier.engine.model import row_attention
from kvtier.engine.model.paged_gather import Scoring, Scratch, attend_gathered
from kvtier.engine.model.paged_segment import Segment, segment
from kvtier.engine.model.row_attention import RowAttention
from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow

CPU = torch.device("cpu")
NUM_SLOTS, NUM_LAYERS, SIZE, NUM_KV_HEADS, HEAD_DIM, NUM_HEADS = 40, 3, 4, 2, 8, 6
KINDS = [FullAttention(SIZE), SlidingWindow(SIZE, 9), ChunkedLocal(SIZE, 12)]
SINKS = torch.linspace(-2, 2, NUM_HEADS)
SCORINGS = [Scoring(0.3), Scoring(0.3, None, SINKS), Scoring(0.3, 1.5), Scoring(0.3, 1.5, SINKS)]
POSITIONS = (0, 3, 8, 9, 26, 39)


@pytest.fixture
def alone() -> Iterator[RowAttention]:
    attention = RowAttention(1)
    yield attention
    attention.close()


def rows_at(group: AttentionGroup, positions: tuple[int, ...]) -> list[Segment]:
    slots = iter(random.Random(1).sample(range(NUM_SLOTS), NUM_SLOTS))
    tables = [[next(slots) for _ in range(position // SIZE + 1)] for position in positions]
    return [
        segment(group, table, slice(row, row + 1), position, 1, CPU)
        for row, (table, position) in enumerate(zip(tables, positions, strict=True))
    ]


def slab_of(parts: list[Segment], dtype: torch.dtype) -> torch.Tensor:
    """A slab with keys and values where the rows may read, and NaN everywhere else."""
    torch.manual_seed(3)
    slab = torch.full((NUM_SLOTS, NUM_LAYERS, 2, SIZE, NUM_KV_HEADS, HEAD_DIM), float("nan"))
    for part in parts:
        for position in range(part.first_key, part.end):
            slot = part.table[(position - part.first_key) // SIZE]
            slab[slot, :, :, position % SIZE] = torch.randn(NUM_LAYERS, 2, NUM_KV_HEADS, HEAD_DIM)
    return slab.to(dtype)


def attend(
    attention: RowAttention, parts: list[Segment], query: torch.Tensor, slab: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    output = torch.zeros(query.shape[2], NUM_HEADS, HEAD_DIM, dtype=query.dtype)
    rows = attention.plan(parts, NUM_LAYERS, NUM_HEADS, HEAD_DIM)
    attention.attend(query, slab, 1, rows, scoring, output)
    return output


@pytest.mark.parametrize("group", KINDS, ids=["full", "sliding", "chunked"])
@pytest.mark.parametrize("scoring", SCORINGS, ids=["plain", "sinks", "softcap", "both"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=["f32", "bf16"])
def test_rows_are_what_gathering_gives(
    alone: RowAttention, group: AttentionGroup, scoring: Scoring, dtype: torch.dtype, error: float
) -> None:
    parts = rows_at(group, POSITIONS)
    slab, query = slab_of(parts, dtype), torch.randn(1, NUM_HEADS, len(parts), HEAD_DIM, dtype=dtype)
    expected = torch.empty(len(parts), NUM_HEADS, HEAD_DIM, dtype=dtype)
    attend_gathered(query, slab, 1, parts, scoring, expected, Scratch())

    output = attend(alone, parts, query, slab, scoring)

    assert torch.allclose(output.float(), expected.float(), atol=error)


@pytest.mark.parametrize("num_threads", [2, 5, 40])
def test_a_row_is_the_same_alone_and_in_any_batch_on_any_number_of_threads(
    alone: RowAttention, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(row_attention, "WORTH_A_THREAD", 1)
    parts = rows_at(FullAttention(SIZE), POSITIONS)
    slab, query = slab_of(parts, torch.float32), torch.randn(1, NUM_HEADS, len(parts), HEAD_DIM)
    by_itself = torch.zeros(len(parts), NUM_HEADS, HEAD_DIM)
    for part in parts:
        by_itself += attend(alone, [part], query, slab, SCORINGS[1])
    many = RowAttention(num_threads)

    together = attend(many, parts, query, slab, SCORINGS[1])
    one_of_them = attend(many, parts[-1:], query, slab, SCORINGS[1])

    many.close()
    assert torch.equal(together, by_itself)
    assert torch.equal(one_of_them[-1], by_itself[-1])


def test_rows_leave_the_tokens_of_other_requests_alone(alone: RowAttention) -> None:
    parts = rows_at(FullAttention(SIZE), POSITIONS)
    slab, query = slab_of(parts, torch.float32), torch.randn(1, NUM_HEADS, len(parts), HEAD_DIM)

    output = attend(alone, parts[1::2], query, slab, SCORINGS[0])

    assert not output[0::2].any()
    assert output[1::2].all()
