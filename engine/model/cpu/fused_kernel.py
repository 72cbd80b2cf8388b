"""The kernels of `fused_norms` and `fused_rotations`, compiled by Numba: one pass over memory each."""

import math

import numpy as np

from kvtier.engine.model.cpu.row_kernel import compiled

Array = np.ndarray


@compiled
def normalize(rows: Array, weight: Array, eps: float, output: Array) -> None:
    """Divide each of *rows*, [num_rows, size] float32, by its root mean square, and multiply it by *weight*."""
    num_rows, size = rows.shape
    for row in range(num_rows):
        numbers, written = rows[row], output[row]
        total = np.float32(0)
        for i in range(size):
            total += numbers[i] * numbers[i]
        factor = np.float32(1 / math.sqrt(total / size + eps))
        for i in range(size):
            written[i] = weight[i] * (numbers[i] * factor)


@compiled
def rotate(heads: Array, cosines: Array, sines: Array, output: Array) -> None:
    """Rotate *heads*, [num_tokens, num_heads, head_dim] float32, by *cosines* and *sines*, [num_tokens, head_dim]: the
    first half of a head with the second.
    """
    num_tokens, num_heads, head_dim = heads.shape
    half = head_dim // 2
    for token in range(num_tokens):
        first_cosines, second_cosines = cosines[token, :half], cosines[token, half:]
        first_sines, second_sines = sines[token, :half], sines[token, half:]
        for head in range(num_heads):
            first, second = heads[token, head, :half], heads[token, head, half:]
            written_first, written_second = output[token, head, :half], output[token, head, half:]
            for d in range(half):
                written_first[d] = first[d] * first_cosines[d] - second[d] * first_sines[d]
                written_second[d] = second[d] * second_cosines[d] + first[d] * second_sines[d]
