"""ChunkMemory: the slots that a segment has for the chunks of one rank of a layout."""

import mmap

import numpy as np

from kvtier.tiers.device.slot_ids import Ids
from kvtier.transfer.segment import Segment


class ChunkMemory:
    """See `SlotMemory`. Each extent can be cut into slots of this memory: they begin at page boundaries, and slot
    numbers go on from extent to extent."""

    num_copiers = 1

    def __init__(self, segment: Segment, extent_bytes: int, chunk_bytes: int) -> None:
        """*extent_bytes* is a multiple of the page size, and not less than *chunk_bytes*."""
        self.block_bytes = chunk_bytes
        self._extent_bytes = extent_bytes
        self._stride = -(-chunk_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.slots_per_extent = extent_bytes // self._stride
        self.num_host_slots = self.slots_per_extent * (segment.num_bytes // extent_bytes)
        self._bytes = memoryview(segment.memory.data)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the segment that a slot takes, with its part of what is left over in an extent."""
        return self._extent_bytes // self.slots_per_extent

    def offset(self, slot: int) -> int:
        """Where the slot's bytes begin in the segment."""
        extent, place = divmod(slot, self.slots_per_extent)
        return extent * self._extent_bytes + place * self._stride

    def host_block(self, slot: int) -> memoryview:
        offset = self.offset(slot)
        return self._bytes[offset : offset + self.block_bytes]

    def slots_of(self, extent: int) -> Ids:
        """The slots of an extent."""
        first = extent * self.slots_per_extent
        return np.arange(first, first + self.slots_per_extent)

    def extent_of_each(self, slots: Ids) -> Ids:
        return slots // self.slots_per_extent

    def extents_of(self, slots: Ids) -> list[int]:
        """The extents that these slots are in, each once."""
        return [int(extent) for extent in np.unique(self.extent_of_each(slots))]
