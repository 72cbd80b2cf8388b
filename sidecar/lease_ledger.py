"""LeaseLedger: in which extents engines may be copying, written beside the segment for the process that comes after."""

import os
import struct

import numpy as np
import numpy.typing as npt

from kvtier.sidecar.layout import SlotMemory
from kvtier.tiers.device.slot_ids import Ids

_HEADER = struct.Struct("<16sQQ")  # what it is, bytes of an extent, extents
_COUNT = 4  # bytes of each count that follows
_MAGIC = b"kvtier ledger 1\0"


class LeaseLedger:
    """For each extent how many slots in it clients have leased. It outlives its process with the segment, in whose file
    it stands behind the extents: an engine that outlives the sidecar, too, may still copy from and to the slots that it
    had, so its successor leaves these extents out. Owned by the sidecar's thread."""

    def __init__(self, memory: npt.NDArray[np.uint8], extent_bytes: int, num_extents: int) -> None:
        """*memory* has `ledger_bytes`: all zero, or what a predecessor has written there with the same numbers."""
        header = _HEADER.pack(_MAGIC, extent_bytes, num_extents)
        memory[: len(header)] = np.frombuffer(header, np.uint8)
        self._counts = memory[_HEADER.size : ledger_bytes(num_extents)].view(np.uint32)
        self.left_out = frozenset(np.flatnonzero(self._counts).tolist())  # the predecessor's; they stay what they are
        self._is_frozen = False

    def lease(self, memory: SlotMemory, slots: Ids) -> None:
        """A client has leased these slots."""
        if not self._is_frozen:
            np.add.at(self._counts, memory.extent_of_each(slots), 1)

    def release(self, memory: SlotMemory, slots: Ids) -> None:
        """Its leases have ended, and it copies no more."""
        if not self._is_frozen:
            np.subtract.at(self._counts, memory.extent_of_each(slots), 1)

    def freeze(self) -> None:
        """Note nothing more: leases end from now on because this process does, and engines may go on copying."""
        self._is_frozen = True

    @property
    def num_leased(self) -> int:
        """Extents in which a client has something leased, with those that are left out."""
        return int(np.count_nonzero(self._counts))


def ledger_bytes(num_extents: int) -> int:
    """What a ledger takes."""
    return _HEADER.size + _COUNT * num_extents


def new_ledger(extent_bytes: int, num_extents: int) -> LeaseLedger:
    """One that no other process sees."""
    return LeaseLedger(np.zeros(ledger_bytes(num_extents), np.uint8), extent_bytes, num_extents)


def why_not_taken_over(file: int, extent_bytes: int, num_extents: int) -> str:
    """Why the segment in this file, with its ledger, is of no use to a sidecar of this size; empty if it is."""
    num_bytes = extent_bytes * num_extents
    if os.fstat(file).st_size != num_bytes + ledger_bytes(num_extents):
        return "it has another size than host.capacity and extent say"
    if os.pread(file, _HEADER.size, num_bytes) != _HEADER.pack(_MAGIC, extent_bytes, num_extents):
        return "it is of another version, or has other extents"
    counts = np.frombuffer(os.pread(file, _COUNT * num_extents, num_bytes + _HEADER.size), np.uint32)
    if 2 * np.count_nonzero(counts) > num_extents:
        return "engines may still copy in more than half of it"
    return ""
