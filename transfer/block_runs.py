"""Block runs: pairs of device and host slots merged into as few contiguous copies as possible."""

from dataclasses import dataclass

import numpy as np

from kvtier.transfer.block_memory import Slots


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """Contiguous copies: copy i moves `num_blocks[i]` blocks, starting at slots `device[i]` and `host[i]`."""

    device: Slots
    host: Slots
    num_blocks: Slots


def merge_adjacent(device: Slots, host: Slots, slots_per_piece: int) -> BlockRuns:
    """Merge pairs of slots that are adjacent on both sides into one copy.

    Host memory is registered with CUDA in pieces of *slots_per_piece* slots. No copy crosses the boundary between two
    pieces, because CUDA rejects such a copy (cudaErrorInvalidValue).
    """
    if not len(device):
        return BlockRuns(device, host, device)
    is_first = np.ones(len(device), bool)
    follows = (np.diff(device) == 1) & (np.diff(host) == 1)
    is_first[1:] = ~follows | (host[1:] % slots_per_piece == 0)
    first = np.flatnonzero(is_first)
    return BlockRuns(device[first], host[first], np.diff(first, append=len(device)))
