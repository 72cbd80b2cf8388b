"""LeaseLedger: the extents in which engines may be copying, recorded next to the segment for the next process."""

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
    """The number of slots that clients have leased in each extent.

    The ledger lies behind the extents in the segment's file, and so outlives its process together with the segment. An
    engine that outlives the sidecar may still copy from and to the slots that it had leased. So the next sidecar does
    not use the extents of these slots. Owned by the sidecar's thread.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], extent_bytes: int, num_extents: int) -> None:
        """Keep the ledger in *memory*, an array of `ledger_bytes` bytes.

        The array is all zero, or a previous process with extents of the same size and number has written to it.
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
        """Record that a client's leases on these slots have ended, and that it copies no more."""
        if not self._is_frozen:
            np.subtract.at(self._counts, memory.extent_of_each(slots), 1)

    def freeze(self) -> None:
        """Stop recording: from now on leases end because this process ends, while engines may continue to copy."""
        self._is_frozen = True

    @property
    def num_leased(self) -> int:
        """Number of extents in which a client has leased slots, including those that are left out."""
        return int(np.count_nonzero(self._counts))


def ledger_bytes(num_extents: int) -> int:
    """Return the size of a ledger in bytes."""
    return _HEADER.size + _COUNT * num_extents


def new_ledger(extent_bytes: int, num_extents: int) -> LeaseLedger:
    """Return a ledger that no other process sees."""
    return LeaseLedger(np.zeros(ledger_bytes(num_extents), np.uint8), extent_bytes, num_extents)


def why_not_taken_over(file: int, extent_bytes: int, num_extents: int) -> str:
    """Return why a sidecar of this size cannot use the segment and ledger in this file; empty if it can."""
    num_bytes = extent_bytes * num_extents
    if os.fstat(file).st_size != num_bytes + ledger_bytes(num_extents):
        return "its size differs from what host.capacity and extent specify"
    if os.pread(file, _HEADER.size, num_bytes) != _HEADER.pack(_MAGIC, extent_bytes, num_extents):
        return "another version of kvtier made it, or its extents have another size"
    counts = np.frombuffer(os.pread(file, _COUNT * num_extents, num_bytes + _HEADER.size), np.uint32)
    if 2 * np.count_nonzero(counts) > num_extents:
        return "engines may still copy from or to more than half of its extents"
    return ""
