"""Block runs: a batch of pairs of slots as few contiguous copies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]  # [num_blocks]


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """Copy i moves `num_blocks[i]` neighbouring blocks between device slot `device[i]` and host slot `host[i]` on."""

    device: Slots
    host: Slots
    num_blocks: Slots


def slot_pairs(
    device_slots: Sequence[int], host_slots: Sequence[int], num_device_slots: int, num_host_slots: int
) -> tuple[Slots, Slots]:
    """The slots of a copy as two arrays, checked, in the order given.

    ValueError if they do not pair up, IndexError for a slot that does not exist: slots become addresses, and what a
    wrong one overwrites would be found much later.
    """
    device, host = np.asarray(device_slots, np.int64), np.asarray(host_slots, np.int64)
    if len(device) != len(host):
        raise ValueError(f"copy: {len(device)} device slots and {len(host)} host slots; give pairs")
    for side, slots, num_slots in (("device", device, num_device_slots), ("host", host, num_host_slots)):
        if len(slots) and not 0 <= slots.min() <= slots.max() < num_slots:
            raise IndexError(f"copy: {side} slots {slots.min()} to {slots.max()}; there are 0 to {num_slots - 1}")
    return device, host


def merge_neighbours(device: Slots, host: Slots, slots_per_piece: int) -> BlockRuns:
    """Join pairs that follow each other on both sides into one copy, never beyond the end of a piece of host memory.

    CUDA refuses a copy that begins in one registration and ends in another (cudaErrorInvalidValue).
    """
    if not len(device):
        return BlockRuns(device, host, device)
    is_first = np.ones(len(device), bool)
    follows = (np.diff(device) == 1) & (np.diff(host) == 1)
    is_first[1:] = ~follows | (host[1:] % slots_per_piece == 0)
    first = np.flatnonzero(is_first)
    return BlockRuns(device[first], host[first], np.diff(first, append=len(device)))
