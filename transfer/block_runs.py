"""Block runs: pairs of device and host slots merged into as few contiguous copies as possible."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]  # [num_blocks]


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """Contiguous copies: copy i moves `num_blocks[i]` blocks, starting at slots `device[i]` and `host[i]`."""

    device: Slots
    host: Slots
    num_blocks: Slots


def slot_pairs(
    device_slots: Sequence[int], host_slots: Sequence[int], num_device_slots: int, num_host_slots: int
) -> tuple[Slots, Slots]:
    """Return the slots of a copy as two arrays, in the order given, after checking them.

    Slots become addresses, so a wrong slot would corrupt memory, and the damage would show much later.

    Raises:
        ValueError: The numbers of device and host slots differ.
        IndexError: A slot does not exist.
    """
    device, host = np.asarray(device_slots, np.int64), np.asarray(host_slots, np.int64)
    if len(device) != len(host):
        raise ValueError(f"copy: got {len(device)} device slots and {len(host)} host slots; give pairs")
    for side, slots, num_slots in (("device", device, num_device_slots), ("host", host, num_host_slots)):
        if len(slots) and not 0 <= slots.min() <= slots.max() < num_slots:
            raise IndexError(
                f"copy: got {side} slots {slots.min()} to {slots.max()}; give slots from 0 to {num_slots - 1}"
            )
    return device, host


def merge_adjacent(device: Slots, host: Slots, slots_per_piece: int) -> BlockRuns:
    """Merge pairs that are adjacent on both sides into one copy, never across a boundary between two host pieces.

    CUDA rejects a copy that begins in one registration and ends in another (cudaErrorInvalidValue).
    """
    if not len(device):
        return BlockRuns(device, host, device)
    is_first = np.ones(len(device), bool)
    follows = (np.diff(device) == 1) & (np.diff(host) == 1)
    is_first[1:] = ~follows | (host[1:] % slots_per_piece == 0)
    first = np.flatnonzero(is_first)
    return BlockRuns(device[first], host[first], np.diff(first, append=len(device)))
