"""Attention over gathered blocks: which keys it copies, which it masks, and what memory it uses."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from kvtier.engine.model.paged_gather import Scoring, Scratch, attend_gathered
from kvtier.engine.model.paged_segment import Segment, segment
from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow

CPU = torch.device("cpu")
NUM_SLOTS, NUM_LAYERS, SIZE, NUM_KV_HEADS, HEAD_DIM, NUM_HEADS = 40, 3, 4, 2, 8, 6
KINDS = [FullAttention(SIZE), SlidingWindow(SIZE, 9), ChunkedLocal(SIZE, 12)]


def is_read(group: AttentionGroup, query: int, key: int) -> bool:
    match group:
        case SlidingWindow(window_tokens=window):
            return query - window < key <= query
        case ChunkedLocal(chunk_tokens=chunk):
            return key <= query and key // chunk == query // chunk
        case _:
            return key <= query


def parts(group: AttentionGroup, spans: list[tuple[int, int]]) -> list[Segment]:
    slots, segments, row = iter(random.Random(1).sample(range(NUM_SLOTS), NUM_SLOTS)), [], 0
    for start, count in spans:
        table = [next(slots) for _ in range(-(-(start + count) // SIZE))]
        segments.append(segment(group, table, slice(row, row + count), start, count, CPU))
        row += count
    return segments


@pytest.mark.parametrize("group", KINDS, ids=["full", "sliding", "chunked"])
@pytest.mark.parametrize("span", [(0, 1), (0, 8), (5, 1), (7, 13), (24, 2), (24, 1), (30, 25)])
def test_a_segment_masks_what_its_kind_of_attention_does_not_read(group: AttentionGroup, span: tuple[int, int]) -> None:
    (part,) = parts(group, [span])

    queries, keys = range(part.start, part.end), range(part.first_key, part.end)
    expected = torch.tensor([[is_read(group, query, key) for key in keys] for query in queries])
    mask = torch.ones_like(expected) if part.mask is None else part.mask
    if part.is_causal:
        mask = mask.tril()

    assert torch.equal(mask, expected)
    assert not any(is_read(group, query, key) for query in queries for key in range(part.first_key))


@pytest.mark.parametrize("group", KINDS, ids=["full", "sliding", "chunked"])
def test_the_mask_of_numbers_hides_the_same_keys_and_is_made_once_for_all_layers(group: AttentionGroup) -> None:
    (part,) = parts(group, [(30, 25)])
    mask, added = part.mask, part.added_mask(torch.bfloat16)

    assert mask is not None
    assert added is not None
    assert added.dtype == torch.bfloat16
    assert torch.equal(added == 0, mask)
    assert torch.equal(added == float("-inf"), ~mask)
    assert part.added_mask(torch.bfloat16) is added


@pytest.mark.parametrize("span", [(7, 13), (30, 25)])
def test_the_mask_that_cuda_knows_by_name_is_the_one_of_a_suffix(span: tuple[int, int]) -> None:
    (part,) = parts(FullAttention(SIZE), [span])
    query = torch.randn(1, 2, part.num_queries, HEAD_DIM)
    keys = torch.randn(1, 2, part.num_keys, HEAD_DIM)

    named = causal_lower_right(part.num_queries, part.num_keys)

    expected = F.scaled_dot_product_attention(query, keys, keys, attn_mask=part.mask)
    assert torch.allclose(F.scaled_dot_product_attention(query, keys, keys, attn_mask=named), expected, atol=1e-6)


@pytest.mark.parametrize("group", KINDS, ids=["full", "sliding", "chunked"])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 2, NUM_HEADS)], ids=["plain", "sinks"])
def test_requests_of_any_length_share_one_copy_and_read_nothing_of_other_slots(
    group: AttentionGroup, sinks: torch.Tensor | None
) -> None:
    segments = parts(group, [(9, 1), (0, 13), (26, 30), (3, 2)])
    slab = torch.full((NUM_SLOTS, NUM_LAYERS, 2, SIZE, NUM_KV_HEADS, HEAD_DIM), float("nan"))
    for part in segments:
        for position in range(part.first_key, part.end):
            slot = part.table[(position - part.first_key) // SIZE]
            slab[slot, :, :, position % SIZE] = torch.randn(NUM_LAYERS, 2, NUM_KV_HEADS, HEAD_DIM)
    num_tokens = segments[-1].rows.stop
    query = torch.randn(1, NUM_HEADS, num_tokens, HEAD_DIM)
    output = torch.empty(num_tokens, NUM_HEADS, HEAD_DIM)
    scratch = Scratch()

    for layer in range(NUM_LAYERS):
        attend_gathered(query, slab, layer, segments, Scoring(0.3, None, sinks), output, scratch)

        for part in segments:
            for i, position in enumerate(range(part.start, part.end)):
                read = [key for key in range(part.end) if is_read(group, position, key)]
                places = [(part.table[(key - part.first_key) // SIZE], key % SIZE) for key in read]
                for head in range(NUM_HEADS):
                    kv = torch.stack([slab[slot, layer, :, place, head // 3] for slot, place in places])
                    scores = 0.3 * kv[:, 0] @ query[0, head, part.rows.start + i]
                    if sinks is not None:
                        scores = torch.cat([scores, sinks[head : head + 1]])
                    expected = torch.softmax(scores, 0)[: len(read)] @ kv[:, 1]
                    assert torch.allclose(output[part.rows.start + i, head], expected, atol=1e-5)


def test_memory_for_copies_is_taken_once_for_the_longest_request() -> None:
    like = torch.empty(1, 12)
    scratch = Scratch()

    first = scratch.of(20, like)
    shorter, again = scratch.of(7, like), scratch.of(20, like)

    assert shorter.shape == (7, 12)
    assert first.data_ptr() == shorter.data_ptr() == again.data_ptr()
