"""The Numba kernel of `row_attention`: one query per row, with keys and values read directly from their KV blocks.

Numba compiles the kernel at the first call, which takes two seconds for each dtype of the slab, and keeps the result in
its cache. The first call happens at load, when a model is compared with its own attention.
"""

import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numba import config, njit
from numba.core import types
from numba.extending import overload

if config.DISABLE_JIT:  # type: ignore[attr-defined]  # Numba sets it from the environment
    raise ImportError("NUMBA_DISABLE_JIT is set, but without compilation this kernel is far too slow; unset it")

Array = np.ndarray
P = ParamSpec("P")
T = TypeVar("T")

# Sums may be reordered, because vector instructions need this. Infinities and NaN are kept.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


def _compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return *function* wrapped so that Numba compiles it at its first call.

    Numba's cache on disk keeps the compiled code, if the cache can be written.
    """
    options: dict[str, Any] = {"nogil": True, "fastmath": _FAST, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)  # type: ignore[no-any-return]  # untyped in Numba
    except RuntimeError:  # no writable folder for the cache, neither next to this file nor in the user's home
        return njit(**options)(function)  # type: ignore[no-any-return]


@_compiled
def attend_rows(
    queries: Array,  # [num_tokens, num_heads, head_dim] float32, of the whole batch
    # [num_slots * group_layers * 2, block_size, num_kv_heads, head_dim] float32, or bfloat16 as uint16: a half is the
    # keys, or the values, of one block in one layer
    halves: Array,
    # [num_rows, 4] int64: the row's token, the index of its first block in `blocks`, the offset of its first key in
    # that block, its number of keys
    rows: Array,
    blocks: Array,  # int64: for each block, the half that has its keys in the first layer
    layer: int,
    heads: tuple[int, int],  # the first query head to attend, and the one after the last
    scale: float,
    softcap: float,  # 0: none
    sinks: Array,  # [num_heads] float32; empty: none
    output: Array,  # [num_tokens, num_heads, head_dim] float32
) -> None:
    """Write the attention of *rows*, each a single token of a request, to *output*, for a range of query *heads*."""
    first, end = heads
    num_kv_heads, head_dim = halves.shape[2:]
    kv_heads = np.arange(first, end) // (queries.shape[1] // num_kv_heads)
    scores = np.empty((rows[:, 3].max(), end - first), np.float32)  # by key, because keys are read in this order
    totals = np.empty(end - first, np.float32)
    floats = np.empty((num_kv_heads, head_dim), np.float32)
    for row in range(len(rows)):
        token, first_block, place, num_keys = rows[row]
        num_blocks = (place + num_keys - 1) // halves.shape[1] + 1
        keys = blocks[first_block : first_block + num_blocks] + 2 * layer
        of_row, attended = scores[:num_keys], output[token, first:end]
        _score(queries[token, first:end], scale, halves, keys, place, kv_heads, floats, of_row)
        _weigh(of_row, softcap, sinks[first:end], totals)
        _add_up(of_row, halves, keys + 1, place, kv_heads, floats, attended)
        for head in range(len(totals)):
            for d in range(head_dim):
                attended[head, d] /= totals[head]


@_compiled
def _score(
    query: Array, scale: float, halves: Array, blocks: Array, place: int, kv_heads: Array, floats: Array, scores: Array
) -> None:
    """Write the products of a token's query and its keys, times *scale*, to *scores* [num_keys, num_heads].

    An entry of *halves* has the keys, or the values, of one KV block in one layer. The keys are in the entries with the
    indices *blocks*, from offset *place* in the first entry on.
    """
    block, factor = 0, np.float32(scale)
    for key in range(len(scores)):
        if place == halves.shape[1]:
            place, block = 0, block + 1
        token, of_key = _as_floats(halves[blocks[block], place], floats), scores[key]  # type: ignore[no-untyped-call]
        for head in range(len(kv_heads)):
            keys, wanted = token[kv_heads[head]], query[head]
            score = np.float32(0)
            for d in range(len(keys)):
                score += wanted[d] * keys[d]
            of_key[head] = factor * score
        place += 1


@_compiled
def _weigh(scores: Array, softcap: float, sinks: Array, totals: Array) -> None:
    """Replace a row's *scores* by unnormalized softmax weights, and write their sum for each head to *totals*.

    The sum includes the head's sink.
    """
    num_keys, num_heads = scores.shape
    if softcap:
        for key in range(num_keys):
            for head in range(num_heads):
                scores[key, head] = softcap * math.tanh(scores[key, head] / softcap)
    top = scores[0].copy()
    for head in range(len(sinks)):
        top[head] = max(top[head], sinks[head])
    for key in range(num_keys):
        for head in range(num_heads):
            top[head] = max(top[head], scores[key, head])
    totals[:] = 0
    for head in range(len(sinks)):
        totals[head] = math.exp(sinks[head] - top[head])
    for key in range(num_keys):
        of_key = scores[key]
        for head in range(num_heads):
            of_key[head] = math.exp(of_key[head] - top[head])
        for head in range(num_heads):
            totals[head] += of_key[head]


@_compiled
def _add_up(
    weights: Array, halves: Array, blocks: Array, place: int, kv_heads: Array, floats: Array, attended: Array
) -> None:
    """Write the sum of a token's values, weighted by *weights* [num_keys, num_heads], to *attended*.

    An entry of *halves* has the keys, or the values, of one KV block in one layer. The values are in the entries with
    the indices *blocks*, from offset *place* in the first entry on.
    """
    attended[:] = 0
    block = 0
    for key in range(len(weights)):
        if place == halves.shape[1]:
            place, block = 0, block + 1
        token, of_key = _as_floats(halves[blocks[block], place], floats), weights[key]  # type: ignore[no-untyped-call]
        for head in range(len(kv_heads)):
            values, weighted, weight = token[kv_heads[head]], attended[head], of_key[head]
            for d in range(len(values)):
                weighted[d] += weight * values[d]
        place += 1


def _as_floats(token, floats):  # type: ignore[no-untyped-def]  # Numba compares signatures, annotations too
    """Return a token's keys or values, [num_kv_heads, head_dim], in float32. *floats* is a buffer for the result."""
    raise NotImplementedError("this placeholder can only be called by code that Numba has compiled")


@overload(_as_floats)
def _compiled_as_floats(token, floats):  # type: ignore[no-untyped-def]  # Numba's types
    if token.dtype == types.float32:
        return lambda token, floats: token

    def widened(token, floats):  # type: ignore[no-untyped-def]
        bits = floats.view(np.uint32)
        for head in range(token.shape[0]):
            for d in range(token.shape[1]):
                bits[head, d] = np.uint32(token[head, d]) << np.uint32(16)
        return floats

    return widened
