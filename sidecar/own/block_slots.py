"""BlockSlots: the slots that a segment has for the blocks of one group of a kvtier engine."""

import numpy as np

from kvtier.tiers.device.slot_ids import Ids
from kvtier.transfer.segment import Segment


class BlockSlots:
    """See `SlotMemory`. Slot s is bytes s * *block_bytes* to before (s + 1) * *block_bytes* of the segment, so that an
    engine sees all of them as one array. A slot that lies across the end of an extent is in none, and of no use."""

    num_copiers = 1

    def __init__(self, segment: Segment, extent_bytes: int, block_bytes: int) -> None:
        """Every extent has a slot: *block_bytes* divides *extent_bytes*, or is at most half of it."""
        self.block_bytes = block_bytes
        self.num_host_slots = segment.num_bytes // block_bytes
        self._extent_bytes = extent_bytes
        self._bytes = memoryview(segment.memory.data)

    @property
    def slot_bytes(self) -> int:
        return self.block_bytes

    def offset(self, slot: int) -> int:
        return slot * self.block_bytes

    def host_block(self, slot: int) -> memoryview:
        return self._bytes[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def slots_of(self, extent: int) -> Ids:
        first = -(-extent * self._extent_bytes // self.block_bytes)
        return np.arange(first, (extent + 1) * self._extent_bytes // self.block_bytes)

    def extent_of_each(self, slots: Ids) -> Ids:
        return slots * self.block_bytes // self._extent_bytes

    def extents_of(self, slots: Ids) -> list[int]:
        return [int(extent) for extent in np.unique(self.extent_of_each(slots))]
