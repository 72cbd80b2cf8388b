"""The copy kernel's own source, compiled for the host: its threads write the bytes they should, and no others."""

import numpy as np
import pytest
from fake_cuda.host_kernel import HostKernel, host_compiler

from kvtier.transfer.cuda import kernel as kernel_module

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="needs a C++ compiler")
WORD_BYTES = 16
FREE = 0xEE


@pytest.fixture(scope="module")
def kernel() -> HostKernel:
    return HostKernel(kernel_module.SOURCE, "copy_blocks")


def words(num_bytes: int, value: int = FREE) -> np.ndarray:
    """Bytes at an address that whole words begin at, and no larger ones."""
    whole = np.full(num_bytes + 3 * WORD_BYTES, value, np.uint8)
    start = -whole.ctypes.data % 32 + WORD_BYTES
    return whole[start : start + num_bytes]


@pytest.mark.parametrize("num_words", [0, 1, 2, 255, 256, 257, 1023, 1024, 1025, 4099])
@pytest.mark.parametrize(("num_rows", "num_threads"), [(1, 1), (1, 256), (3, 32), (5, 256)])
@pytest.mark.parametrize("num_blocks", [1, 7])
def test_every_word_of_every_block_is_copied_and_nothing_beside_it(
    kernel: HostKernel, num_blocks: int, num_rows: int, num_threads: int, num_words: int
) -> None:
    """For any shape of the launch: too few threads take several words each, of too many some take none."""
    rng = np.random.default_rng(num_words)
    slot_bytes = (num_words + 2) * WORD_BYTES  # a free word before and one behind each block
    source = words(num_blocks * slot_bytes).reshape(num_blocks, slot_bytes)
    source[:] = rng.integers(0, 256, source.shape, dtype=np.uint8)
    target = words(2 * num_blocks * slot_bytes).reshape(2 * num_blocks, slot_bytes)
    slots = rng.permutation(2 * num_blocks)[:num_blocks]
    expected = target.copy()
    expected[slots, WORD_BYTES:-WORD_BYTES] = source[:, WORD_BYTES:-WORD_BYTES]
    sources = source.ctypes.data + WORD_BYTES + np.arange(num_blocks) * slot_bytes
    targets = target.ctypes.data + WORD_BYTES + slots * slot_bytes

    kernel((num_blocks, num_rows), num_threads, [sources.ctypes.data, targets.ctypes.data, num_words])

    assert np.array_equal(target, expected)


def test_only_the_blocks_in_the_launch_are_copied(kernel: HostKernel) -> None:
    source, target = words(4 * 64, 7).reshape(4, 64), words(4 * 64).reshape(4, 64)
    tables = np.array([[block.ctypes.data for block in side] for side in (source, target)])

    kernel((3, 1), 256, [tables[0].ctypes.data, tables[1].ctypes.data, 4])

    assert (target[:3] == 7).all()
    assert (target[3] == FREE).all()
