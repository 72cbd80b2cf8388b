"""Block runs: scattered slot pairs as few contiguous copies, none across the end of a registered piece."""

import numpy as np
import pytest

from kvtier.transfer.block_memory import Slots, slot_pairs
from kvtier.transfer.block_runs import BlockRuns, merge_adjacent


def runs(device: list[int], host: list[int], slots_per_piece: int = 1000) -> list[tuple[int, int, int]]:
    merged = merge_adjacent(np.array(device, np.int64), np.array(host, np.int64), slots_per_piece)
    return list(zip(merged.device.tolist(), merged.host.tolist(), merged.num_blocks.tolist(), strict=True))


def single_blocks(merged: BlockRuns) -> list[tuple[int, int]]:
    return [
        (above + i, below + i)
        for above, below, num_blocks in zip(merged.device, merged.host, merged.num_blocks, strict=True)
        for i in range(num_blocks)
    ]


def test_scattered_pairs_are_a_copy_each() -> None:
    assert runs([5, 1, 9], [2, 8, 4]) == [(5, 2, 1), (1, 8, 1), (9, 4, 1)]


def test_neighbours_on_both_sides_are_one_copy() -> None:
    assert runs([5, 6, 7], [2, 3, 4]) == [(5, 2, 3)]


def test_neighbours_on_one_side_only_are_not() -> None:
    assert runs([5, 6], [2, 9]) == [(5, 2, 1), (6, 9, 1)]
    assert runs([5, 8], [2, 3]) == [(5, 2, 1), (8, 3, 1)]


def test_slots_in_falling_order_are_not() -> None:
    assert runs([6, 5], [3, 2]) == [(6, 3, 1), (5, 2, 1)]


def test_a_run_ends_where_its_piece_of_host_memory_does() -> None:
    assert runs([0, 1, 2, 3, 4], [6, 7, 8, 9, 10], slots_per_piece=4) == [(0, 6, 2), (2, 8, 3)]


def test_pieces_of_one_slot_make_single_copies() -> None:
    assert runs([0, 1], [0, 1], slots_per_piece=1) == [(0, 0, 1), (1, 1, 1)]


def test_nothing_is_no_copy() -> None:
    assert runs([], []) == []


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_the_pairs_in_order_and_stay_inside_pieces(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    slots_per_piece = int(rng.integers(1, 9))
    starts = rng.permutation(20)[:6] * 10
    device: Slots = np.concatenate([start + np.arange(rng.integers(1, 10)) for start in starts])
    host = device[::-1].copy() if seed % 2 else device + 3

    merged = merge_adjacent(device, host, slots_per_piece)

    assert single_blocks(merged) == list(zip(device.tolist(), host.tolist(), strict=True))
    last = merged.host + merged.num_blocks - 1
    assert np.array_equal(merged.host // slots_per_piece, last // slots_per_piece)


def test_pairs_keep_their_order() -> None:
    device, host = slot_pairs([3, 1], (0, 4), num_device_slots=4, num_host_slots=5)

    assert (device.tolist(), host.tolist()) == ([3, 1], [0, 4])
    assert device.dtype == host.dtype == np.int64


def test_a_wrong_slot_is_named_with_what_there_is() -> None:
    with pytest.raises(IndexError, match="device slots 1 to 4; give slots from 0 to 3"):
        slot_pairs([1, 4], [0, 1], num_device_slots=4, num_host_slots=5)
    with pytest.raises(IndexError, match="host slots -1 to 0; give slots from 0 to 4"):
        slot_pairs([1, 2], [0, -1], num_device_slots=4, num_host_slots=5)
