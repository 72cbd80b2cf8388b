"""The kernel of `row_attention`, compiled by Numba: one query a row, over keys and values in the blocks that have them.

It is compiled when it is first called, in two seconds for each type of the slab, and what was compiled is kept in
Numba's cache. That is while a model is loaded and compared with its own attention.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numba.core import types
from numba.extending import overload

Array = np.ndarray

# Sums may be reordered, which vectors need. Infinities stay what they are.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_NO_SCORE = np.float32(-np.inf)


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    options: dict[str, Any] = {"nogil": True, "fastmath": _FAST, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)  # type: ignore[no-any-return]  # untyped in Numba
    except RuntimeError:  # no folder that can be written to, neither beside this file nor in the user's home
        return njit(**options)(function)  # type: ignore[no-any-return]


@_compiled
def attend_rows(
    queries: Array,  # [num_rows, num_heads, head_dim] float32, times the scale
    halves: Array,  # [num_slots * group_layers * 2, block_size, num_kv_heads, head_dim] float32, or uint16: bfloat16
    rows: Array,  # [num_rows, 3] int64: where its blocks begin in `blocks`, its first key's place there, its keys
    blocks: Array,  # int64: the half of each block that has its first layer's keys
    layer: int,
    heads: tuple[int, int],  # the first query head to attend, and the one after the last
    softcap: float,  # 0: none
    sinks: Array,  # [num_heads] float32; empty: none
    output: Array,  # [num_rows, num_heads, head_dim] float32
) -> None:
    """Attend *heads* of all rows and write them to *output*."""
    _, block_size, num_kv_heads, head_dim = halves.shape
    first_head, end_head = heads
    heads_per_kv = queries.shape[1] // num_kv_heads
    num_heads = end_head - first_head
    scores = np.empty((rows[:, 2].max(), num_heads), np.float32)  # by key, as keys are read: their heads in a row
    top, total = np.empty(num_heads, np.float32), np.empty(num_heads, np.float32)
    kv_heads = np.arange(first_head, end_head) // heads_per_kv
    floats = np.empty((num_kv_heads, head_dim), np.float32)

    for row in range(len(rows)):
        first_block, first_place, num_keys = rows[row]
        query, attended = queries[row], output[row]

        place, block = first_place, first_block
        for key in range(num_keys):
            if place == block_size:
                place, block = 0, block + 1
            token = _as_floats(halves[blocks[block] + 2 * layer][place], floats)
            place += 1
            of_key = scores[key]
            for i in range(num_heads):
                head = first_head + i
                keys, wanted = token[kv_heads[i]], query[head]
                score = np.float32(0)
                for d in range(head_dim):
                    score += wanted[d] * keys[d]
                of_key[i] = score

        if softcap:
            for key in range(num_keys):
                for i in range(num_heads):
                    scores[key, i] = softcap * math.tanh(scores[key, i] / softcap)
        for i in range(num_heads):
            top[i] = sinks[first_head + i] if len(sinks) else _NO_SCORE
        for key in range(num_keys):
            for i in range(num_heads):
                top[i] = max(top[i], scores[key, i])
        for i in range(num_heads):
            total[i] = math.exp(sinks[first_head + i] - top[i]) if len(sinks) else np.float32(0)
        for key in range(num_keys):
            of_key = scores[key]
            for i in range(num_heads):
                of_key[i] = math.exp(of_key[i] - top[i])
            for i in range(num_heads):
                total[i] += of_key[i]

        attended[first_head:end_head] = 0
        place, block = first_place, first_block
        for key in range(num_keys):
            if place == block_size:
                place, block = 0, block + 1
            token = _as_floats(halves[blocks[block] + 2 * layer + 1][place], floats)
            place += 1
            of_key = scores[key]
            for i in range(num_heads):
                head = first_head + i
                values, weighted, weight = token[kv_heads[i]], attended[head], of_key[i]
                for d in range(head_dim):
                    weighted[d] += weight * values[d]
        for i in range(num_heads):
            weighted = attended[first_head + i]
            for d in range(head_dim):
                weighted[d] /= total[i]


def _as_floats(token, floats):  # type: ignore[no-untyped-def]  # Numba compares signatures, annotations too
    """A token's keys or values, [num_kv_heads, head_dim], in float32; *floats* is memory for them."""
    raise NotImplementedError("chosen by type, where it is compiled")


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
