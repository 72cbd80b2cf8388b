"""The kernel of `chunk_attention`, compiled by Numba: many queries of one request, over keys and values in its blocks.

Keys are taken so many at a time, for all queries that read them, and the sums of those before are rescaled where a
greater score comes (online softmax, as flash attention has it). Products are made in registers, which Numba has no
words for: `_tile` writes them in LLVM's. It is compiled as `row_kernel` is, in four seconds.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kvtier.engine.model.cpu.row_kernel import _as_floats, compiled

Array = np.ndarray

KEYS = 128  # at a time: theirs and the values' copies of one head fit into the second cache, with the scores
TOKENS = 48  # at a time
ROWS, COLUMNS, LANES = 8, 16, 16  # of a tile: eight sums, a row of numbers and a factor, in registers
MIN = np.float32(-126)  # of the powers of two that are told apart
LOG2_E = np.float32(math.log2(math.e))
TAYLOR = tuple(np.float32(math.log(2) ** k / math.factorial(k)) for k in range(8))  # of 2 ** x


@compiled
def attend_chunk(
    queries: Array,  # [num_tokens, num_heads, head_dim] float32
    halves: Array,  # [num_slots * group_layers * 2, block_size, num_kv_heads, head_dim] float32, or uint16: bfloat16
    blocks: Array,  # int64: the half of each block of the request that has its first layer's keys
    reads: Array,  # [num_tokens, 2] int64, ascending: the first key that is read, and the one after the last
    layer: int,
    kv_head: int,
    scale: float,
    softcap: float,  # 0: none
    sinks: Array,  # [num_heads] float32; empty: none
    output: Array,  # [num_tokens, num_heads, head_dim] float32
) -> None:
    """Attend the query heads of *kv_head* and write them to *output*."""
    num_tokens, num_heads, head_dim = queries.shape
    group = num_heads // halves.shape[2]
    heads = range(kv_head * group, kv_head * group + group)
    keys = np.empty((head_dim, KEYS), np.float32)
    values = np.empty((KEYS, head_dim), np.float32)
    scores = np.empty((TOKENS, KEYS), np.float32)
    folded = np.empty(KEYS // 2, np.float32)
    floats = np.empty(halves.shape[2:], np.float32)
    tops = np.full((num_heads, num_tokens), -np.inf, np.float32)
    totals = np.zeros((num_heads, num_tokens), np.float32)
    for head in heads:
        output[:, head] = 0
        if len(sinks):
            tops[head], totals[head] = sinks[head], 1
    for begin in range(reads[0, 0] // KEYS * KEYS, reads[-1, 1], KEYS):
        num_keys = min(KEYS, reads[-1, 1] - begin)
        _copy(halves, blocks, layer, begin, num_keys, kv_head, scale, floats, keys, values)
        for head in heads:
            for token in range(0, num_tokens, TOKENS):
                stop = min(token + TOKENS, num_tokens)
                last = min(num_keys, reads[stop - 1, 1] - begin)
                if last <= 0 or reads[token, 0] >= begin + num_keys:
                    continue
                width = -(-last // COLUMNS) * COLUMNS
                weights = scores[: stop - token, :width]
                scores[: stop - token] = 0
                _add_products(queries[token:stop, head], keys, weights)
                for row in range(stop - token):
                    first, end = reads[token + row, 0] - begin, min(last, reads[token + row, 1] - begin)
                    fade = _weigh(
                        scores[row], max(0, first), end, softcap, folded, tops[head], totals[head], token + row
                    )
                    if fade != 1:
                        summed = output[token + row, head]
                        for d in range(head_dim):
                            summed[d] *= fade
                _add_products(weights, values, output[token:stop, head])
    for head in heads:
        for token in range(num_tokens):
            for d in range(head_dim):
                output[token, head, d] /= totals[head, token]


@compiled
def _copy(
    halves: Array, blocks: Array, layer: int, begin: int, num_keys: int, kv_head: int, scale: float, floats: Array,
    keys: Array, values: Array,
) -> None:  # fmt: skip
    """Copy so many keys from *begin* on, across and times *scale*, and their values; the rest up to a tile is zero."""
    block_size, factor = halves.shape[1], np.float32(scale)
    for key in range(num_keys):
        block, place = divmod(begin + key, block_size)
        half = blocks[block] + 2 * layer
        token = _as_floats(halves[half, place], floats)[kv_head]
        for d in range(len(token)):
            keys[d, key] = factor * token[d]
        token = _as_floats(halves[half + 1, place], floats)[kv_head]
        for d in range(len(token)):
            values[key, d] = token[d]
    end = -(-num_keys // COLUMNS) * COLUMNS
    keys[:, num_keys:end] = 0
    values[num_keys:end] = 0


@compiled
def _weigh(
    scores: Array, first: int, end: int, softcap: float, folded: Array, tops: Array, totals: Array, token: int
) -> float:
    """Turn a token's scores into weights, zero outside *first* to *end*; what to multiply its sums so far by."""
    if first >= end:
        scores[:] = 0
        return np.float32(1)  # type: ignore[return-value]  # Numba's float
    if softcap:
        for key in range(first, end):
            scores[key] = softcap * math.tanh(scores[key] / softcap)
    scores[:first] = -np.inf
    scores[end:] = -np.inf
    top = max(tops[token], _largest(scores, folded))
    fade = np.float32(math.exp(tops[token] - top))
    total = np.float32(0)
    for key in range(KEYS):  # e ** x as 2 ** y: the whole part of y goes into the exponent's bits
        y = max((scores[key] - top) * LOG2_E, MIN)
        whole = np.int32(y - np.float32(0.5))
        x = y - np.float32(whole)
        rest = x * (TAYLOR[4] + x * (TAYLOR[5] + x * (TAYLOR[6] + x * TAYLOR[7])))
        power = TAYLOR[0] + x * (TAYLOR[1] + x * (TAYLOR[2] + x * (TAYLOR[3] + rest)))
        weight = power * _power_of_two(whole)  # type: ignore[call-arg]  # the first is Numba's
        scores[key] = weight
        total += weight
    tops[token], totals[token] = top, totals[token] * fade + total
    scores[:first] = 0
    scores[end:] = 0
    return fade  # type: ignore[return-value]


@compiled
def _largest(numbers: Array, folded: Array) -> float:
    """The largest of `KEYS` numbers; *folded* is memory for half of them. Folding is what LLVM makes vectors of."""
    half = KEYS // 2
    for i in range(half):
        folded[i] = max(numbers[i], numbers[half + i])
    while half > LANES:
        half //= 2
        for i in range(half):
            folded[i] = max(folded[i], folded[half + i])
    top = folded[0]
    for i in range(1, LANES):
        top = max(top, folded[i])
    return top


@intrinsic
def _power_of_two(_, exponent):
    """2 ** exponent, a whole number from -126 on, as the float32 that has it in its bits."""

    def generate(context, builder, signature, arguments):
        word = ir.IntType(32)
        (value,) = arguments
        value = value if value.type.width == 32 else builder.trunc(value, word)
        return builder.bitcast(builder.shl(builder.add(value, word(127)), word(23)), ir.FloatType())

    return types.float32(exponent), generate


@compiled
def _add_products(left: Array, right: Array, sums: Array) -> None:
    """Add the matrix product of *left* and *right* to *sums*, whose columns fill tiles."""
    num_rows = len(sums)
    for column in range(0, sums.shape[1], COLUMNS):
        row = 0
        while row + ROWS <= num_rows:
            _tile_of_rows(left, right, sums, row, column)
            row += ROWS
        while row < num_rows:
            _tile_of_one(left, right, sums, row, column)
            row += 1


def _tile(num_rows: int) -> Any:
    """The product of *num_rows* rows and `COLUMNS` columns, all of whose sums stay in registers."""
    number, size = ir.FloatType(), ir.IntType(64)
    vector = ir.VectorType(number, LANES)
    num_vectors = COLUMNS // LANES

    def constant(value: int) -> ir.Constant:
        return ir.Constant(size, value)

    @intrinsic
    def tile(_, left, right, sums, row, column):
        def generate(context, builder, signature, arguments):
            left, right, sums = (
                context.make_array(kind)(context, builder, value)
                for kind, value in zip(signature.args[:3], arguments[:3], strict=True)
            )
            row, column = arguments[3:]

            def address(array, row, column):
                stride = builder.extract_value(array.strides, 0)
                offset = builder.add(builder.mul(row, stride), builder.mul(column, constant(4)))
                return builder.add(builder.ptrtoint(array.data, size), offset)

            def vectors_at(start):
                places = (builder.add(start, constant(4 * LANES * i)) for i in range(num_vectors))
                return [builder.inttoptr(place, vector.as_pointer()) for place in places]

            def load(pointer):
                loaded = builder.load(pointer)
                loaded.align = 4
                return loaded

            rows = [builder.add(row, constant(i)) for i in range(num_rows)]
            places = [vectors_at(address(sums, row, column)) for row in rows]
            totals = [[cgutils.alloca_once_value(builder, load(place)) for place in of_row] for of_row in places]
            begins = [address(left, row, constant(0)) for row in rows]
            depth = builder.extract_value(left.shape, 1)
            with cgutils.for_range(builder, depth, intp=size) as loop:
                columns = [load(place) for place in vectors_at(address(right, loop.index, column))]
                for begin, of_row in zip(begins, totals, strict=True):
                    place = builder.add(begin, builder.mul(loop.index, constant(4)))
                    factor = builder.load(builder.inttoptr(place, number.as_pointer()))
                    first = builder.insert_element(ir.Constant(vector, ir.Undefined), factor, ir.IntType(32)(0))
                    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
                    factors = builder.shuffle_vector(first, first, lanes)
                    for total, of_column in zip(of_row, columns, strict=True):
                        product = builder.fmul(factors, of_column, flags=["contract"])
                        builder.store(builder.fadd(product, builder.load(total), flags=["contract"]), total)
            for of_row, totals_of_row in zip(places, totals, strict=True):
                for place, total in zip(of_row, totals_of_row, strict=True):
                    builder.store(builder.load(total), place).align = 4
            return context.get_dummy_value()

        return types.void(left, right, sums, row, column), generate

    return tile


_tile_of_rows, _tile_of_one = _tile(ROWS), _tile(1)
