"""LeaseLedger: a record, for the next sidecar process, of the parts of host memory that engines may still use."""

import os
import struct

import numpy as np
import numpy.typing as npt

from kvtier.sidecar.layout import SlotMemory
from kvtier.tiers.device.slot_ids import Ids

_HEADER = struct.Struct("<16sQQ")  # magic, bytes of an extent, number of extents
_COUNT = 4  # bytes of each count that follows
_MAGIC = b"kvtier ledger 1\0"


class LeaseLedger:
    """The number of slots that clients have leased in each extent, a part of the shared host memory (the segment).

    An engine that outlives the sidecar may still copy from or to the slots that it had leased. So the next sidecar
    process must not use the extents of these slots. It learns them from the ledger, which is stored in the segment's
    file after the last extent. Owned by the sidecar's thread.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], extent_bytes: int, num_extents: int) -> None:
        """Keep the ledger in *memory*, an array of `ledger_bytes` bytes.

        The array is all zero, or has the ledger of a previous process with extents of the same size and number.
        """
        header = _HEADER.pack(_MAGIC, extent_bytes, num_extents)
        memory[: len(header)] = np.frombuffer(header, np.uint8)
        self._counts = memory[_HEADER.size : ledger_bytes(num_extents)].view(np.uint32)
        self.left_out = frozenset(
            np.flatnonzero(self._counts).tolist()
        )  # leased in the previous process; never changes
        self._is_frozen = False

    def lease(self, memory: SlotMemory, slots: Ids) -> None:
        """Record that a client has leased these slots."""
        if not self._is_frozen:
            np.add.at(self._counts, memory.extent_of_each(slots), 1)

    def release(self, memory: SlotMemory, slots: Ids) -> None:
        """Record that a client has ended its leases on these slots, and no longer copies from or to them."""
        if not self._is_frozen:
            np.subtract.at(self._counts, memory.extent_of_each(slots), 1)

    def freeze(self) -> None:
        """Stop recording. Leases that end because this process ends stay in the ledger, as engines may still copy."""
        self._is_frozen = True

    @property
    def num_leased(self) -> int:
        """Number of extents (parts of host memory) with leased slots, including leases of the previous process."""
        return int(np.count_nonzero(self._counts))


def ledger_bytes(num_extents: int) -> int:
    """Return the size in bytes of a `LeaseLedger` for host memory of *num_extents* extents (parts)."""
    return _HEADER.size + _COUNT * num_extents


def new_ledger(extent_bytes: int, num_extents: int) -> LeaseLedger:
    """Return an empty `LeaseLedger` in private memory, for host memory that no later process reuses."""
    return LeaseLedger(np.zeros(ledger_bytes(num_extents), np.uint8), extent_bytes, num_extents)


def why_not_taken_over(file: int, extent_bytes: int, num_extents: int) -> str:
    """Return why the segment in *file* cannot be reused with extents of this size and number; empty if it can."""
    num_bytes = extent_bytes * num_extents
    if os.fstat(file).st_size != num_bytes + ledger_bytes(num_extents):
        return "its size differs from what host.capacity and extent specify"
    if os.pread(file, _HEADER.size, num_bytes) != _HEADER.pack(_MAGIC, extent_bytes, num_extents):
        return "another version of kvtier made it, or its extents have another size"
    counts = np.frombuffer(os.pread(file, _COUNT * num_extents, num_bytes + _HEADER.size), np.uint32)
    if 2 * np.count_nonzero(counts) > num_extents:
        return "engines may still copy from or to more than half of its extents"
    return ""
