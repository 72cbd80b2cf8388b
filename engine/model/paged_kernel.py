# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (Values of Triton's language have no Python types, and its decorator is untyped.)
"""Triton kernels for attention that reads keys and values from KV blocks in place. Requires Triton.

In `attend_tiles`, a program handles a tile: some queries of one segment, with all query heads of one KV head. The
program reads each key and value once for the whole tile. It iterates over the keys, *TILE_KEYS* at a time, with an
online softmax in float32 (FlashAttention). If the keys of a tile are cut into splits, one program handles each split,
and `merge_splits` merges the results (flash-decoding).

Masks are computed from positions. A key is loaded only if some query of the tile reads it. So the content of other
slots and of the tail of the last block has no effect, even if it is NaN.

Keys are addressed individually, so any block size works: a tile may span several blocks or a part of one. Tiles of keys
begin at multiples of TILE_KEYS counted from the start of the prompt, not of the chunk.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # the softmax uses powers of two, because exp2 is one instruction
FULL, SLIDING, CHUNKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SEGMENT_FIELDS = tl.constexpr(8)  # row, num_queries, start, first_key, first_slot, num_splits, first_partial, unused
NOTHING = tl.constexpr(float("-inf"))  # the maximum of no scores


@triton.jit
def _oldest_key(position, span, MASK: tl.constexpr):
    """Return the position of the first token that the token at *position* reads."""
    if MASK == SLIDING:
        oldest = tl.maximum(position - span + 1, 0)
    elif MASK == CHUNKED:
        oldest = position // span * span
    else:
        oldest = position * 0
    return oldest


@triton.jit
def _attend_keys(
    queries,  # [TILE_ROWS, PADDED_DIM]
    summed,  # [TILE_ROWS, PADDED_DIM] float32: weighted sums of values
    top,  # [TILE_ROWS]: the largest score so far, as a base-2 logarithm
    weight,  # [TILE_ROWS]: the sum of the weights
    begin,
    end,
    low,  # the tile's queries together read keys low to high - 1
    high,
    positions,  # [TILE_ROWS]
    keys_base,
    slots,
    first_key,
    slot_stride,
    scale,
    softcap,
    span,
    EDGE: tl.constexpr,  # whether some of these keys are masked for some query
    MASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    dims = tl.arange(0, PADDED_DIM)
    for first in range(begin, end, TILE_KEYS):
        keys = first + tl.arange(0, TILE_KEYS)
        is_read = (keys >= low) & (keys < high)
        index = keys - first_key
        if EDGE:
            slot = tl.load(slots + index // BLOCK_SIZE, mask=is_read, other=0)
        else:
            slot = tl.load(slots + index // BLOCK_SIZE)
        place = slot.to(tl.int64) * slot_stride + (index % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
        key_places = keys_base + place[None, :] + dims[:, None]
        value_places = keys_base + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM + place[:, None] + dims[None, :]
        if EDGE or PADDED_DIM != HEAD_DIM:
            is_dim = dims < HEAD_DIM
            if EDGE:
                key = tl.load(key_places, mask=is_read[None, :] & is_dim[:, None], other=0.0)
                value = tl.load(value_places, mask=is_read[:, None] & is_dim[None, :], other=0.0)
            else:
                key = tl.load(key_places, mask=is_dim[:, None], other=0.0)
                value = tl.load(value_places, mask=is_dim[None, :], other=0.0)
        else:
            key = tl.load(key_places)
            value = tl.load(value_places)

        scores = tl.dot(queries, key, input_precision=PRECISION) * scale
        if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1); at either end the fraction is 0 or 2
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E) / softcap) + 1.0))
        scores *= LOG2_E
        if EDGE:
            seen = is_read[None, :] & (keys[None, :] <= positions[:, None])
            if MASK == SLIDING:
                seen &= keys[None, :] > positions[:, None] - span
            elif MASK == CHUNKED:
                seen &= keys[None, :] >= positions[:, None] // span * span
            scores = tl.where(seen, scores, NOTHING)
        new_top = tl.maximum(top, tl.max(scores, 1))
        zero = new_top
        if EDGE:  # a row may have seen no key yet, and -inf - -inf is NaN
            zero = tl.where(new_top == NOTHING, 0.0, new_top)
        weights = tl.exp2(scores - zero[:, None])
        shrink = tl.exp2(top - zero)
        weight = weight * shrink + tl.sum(weights, 1)
        summed = tl.dot(weights.to(value.dtype), value, summed * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return summed, top, weight


@triton.jit
def attend_tiles(
    query,  # [num_heads, num_tokens, head_dim] by its strides, the last of them 1
    layer,  # [num_slots, 2, block_size, num_kv_heads, head_dim] by slot_stride: the slab from this layer on
    output,  # [num_tokens, num_heads, head_dim]
    partial_sums,  # [num_partials, num_heads, head_dim] float32
    partial_weights,  # [num_partials, num_heads, 2] float32: top and weight
    sinks,  # [num_heads]
    segments,  # [num_segments, SEGMENT_FIELDS] int32
    tiles,  # [num_tiles, 2] int32: segment, first query
    slots,  # int32, the tables of all segments
    head_stride,
    token_stride,
    slot_stride,
    scale,
    softcap,
    span,
    MASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the attention of one tile of queries. Grid: (num_tiles, num_kv_heads, largest num_splits)."""
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    segments += tl.load(tiles + 2 * tile) * SEGMENT_FIELDS
    first_query = tl.load(tiles + 2 * tile + 1)
    row, num_queries, start = tl.load(segments), tl.load(segments + 1), tl.load(segments + 2)
    first_key, first_slot = tl.load(segments + 3), tl.load(segments + 4)
    num_splits, first_partial = tl.load(segments + 5), tl.load(segments + 6)
    if split >= num_splits:
        return

    tile_rows = tl.arange(0, TILE_ROWS)
    query_ids = first_query + tile_rows // HEADS_PER_KV
    heads = kv_head * HEADS_PER_KV + tile_rows % HEADS_PER_KV
    is_row = (tile_rows < TILE_QUERIES * HEADS_PER_KV) & (query_ids < num_queries)
    positions = start + query_ids
    dims = tl.arange(0, PADDED_DIM)
    is_cell = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    places = heads * head_stride + (row + query_ids) * token_stride
    queries = tl.load(query + places[:, None] + dims[None, :], mask=is_cell, other=0.0)

    # The range of keys that some query of the tile reads, and within it the tiles of keys that all queries read.
    last_query = tl.minimum(first_query + TILE_QUERIES, num_queries) - 1
    low, high = _oldest_key(start + first_query, span, MASK), start + last_query + 1
    first_tile = low // TILE_KEYS * TILE_KEYS
    split_keys = tl.cdiv(tl.cdiv(high - first_tile, num_splits), TILE_KEYS) * TILE_KEYS
    begin = first_tile + split * split_keys
    end = tl.maximum(tl.minimum(begin + split_keys, high), begin)
    read_by_all = tl.cdiv(_oldest_key(start + last_query, span, MASK), TILE_KEYS) * TILE_KEYS
    middle = tl.minimum(tl.maximum(read_by_all, begin), end)
    back = tl.maximum(tl.minimum((start + first_query + 1) // TILE_KEYS * TILE_KEYS, end), middle)

    summed = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    top = tl.full([TILE_ROWS], NOTHING, tl.float32)
    weight = tl.zeros([TILE_ROWS], tl.float32)
    if HAS_SINKS and num_splits == 1:  # otherwise the merge of the splits adds them
        top = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        weight += 1.0
    keys_base = layer + kv_head * HEAD_DIM
    slots += first_slot
    if MASK != FULL:
        summed, top, weight = _attend_keys(
            queries, summed, top, weight, begin, middle, low, high, positions, keys_base, slots, first_key,
            slot_stride, scale, softcap, span, True, MASK, HAS_SOFTCAP, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE,
            TILE_KEYS, PRECISION,
        )  # fmt: skip
    summed, top, weight = _attend_keys(
        queries, summed, top, weight, middle, back, low, high, positions, keys_base, slots, first_key,
        slot_stride, scale, softcap, span, False, MASK, HAS_SOFTCAP, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE,
        TILE_KEYS, PRECISION,
    )  # fmt: skip
    summed, top, weight = _attend_keys(
        queries, summed, top, weight, back, end, low, high, positions, keys_base, slots, first_key,
        slot_stride, scale, softcap, span, True, MASK, HAS_SOFTCAP, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE,
        TILE_KEYS, PRECISION,
    )  # fmt: skip

    if num_splits == 1:
        attended = summed / tl.where(is_row, weight, 1.0)[:, None]
        places = (row + query_ids) * NUM_HEADS + heads
        tl.store(output + places[:, None] * HEAD_DIM + dims[None, :], attended.to(output.dtype.element_ty), is_cell)
    else:
        partials = (first_partial + query_ids * num_splits + split).to(tl.int64) * NUM_HEADS + heads
        tl.store(partial_sums + partials[:, None] * HEAD_DIM + dims[None, :], summed, is_cell)
        tl.store(partial_weights + partials * 2, top, is_row)
        tl.store(partial_weights + partials * 2 + 1, weight, is_row)


@triton.jit
def merge_splits(
    partial_sums,
    partial_weights,
    output,
    sinks,
    segments,
    rows,  # [num_rows, 2] int32: segment, query
    HAS_SINKS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
):
    """Merge the partial results for one query and head, each over a part of the keys. Grid: (num_rows, num_heads)."""
    head = tl.program_id(1)
    segments += tl.load(rows + 2 * tl.program_id(0)) * SEGMENT_FIELDS
    query_id = tl.load(rows + 2 * tl.program_id(0) + 1)
    row, num_splits, first_partial = tl.load(segments), tl.load(segments + 5), tl.load(segments + 6)
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM

    summed = tl.zeros([PADDED_DIM], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head).to(tl.float32) * LOG2_E
        weight = top * 0.0 + 1.0
    else:
        top = query_id * 0.0 + NOTHING
        weight = query_id * 0.0
    for first in range(0, num_splits, TILE_SPLITS):
        splits = first + tl.arange(0, TILE_SPLITS)
        is_split = splits < num_splits
        partials = (first_partial + query_id * num_splits + splits).to(tl.int64) * NUM_HEADS + head
        tops = tl.load(partial_weights + partials * 2, mask=is_split, other=NOTHING)
        weights = tl.load(partial_weights + partials * 2 + 1, mask=is_split, other=0.0)
        places = partials[:, None] * HEAD_DIM + dims[None, :]
        sums = tl.load(partial_sums + places, mask=is_split[:, None] & is_dim[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        zero = tl.where(new_top == NOTHING, 0.0, new_top)  # the first splits may have read nothing
        grow, shrink = tl.exp2(tops - zero), tl.exp2(top - zero)
        weight = weight * shrink + tl.sum(weights * grow, 0)
        summed = summed * shrink + tl.sum(sums * grow[:, None], 0)
        top = new_top
    place = ((row + query_id) * NUM_HEADS + head) * HEAD_DIM
    tl.store(output + place + dims, (summed / weight).to(output.dtype.element_ty), mask=is_dim)
