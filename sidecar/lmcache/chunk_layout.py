"""ChunkLayout: what decides the bytes of a chunk of an LMCache client's KV beside its tokens."""

import hashlib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from kvtier.sidecar.layout import LayoutRefused
from kvtier.sidecar.lmcache.chunk_part import MAX_RANKS, ChunkPart, check_fields, memories_of
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.groups import FullAttention
from kvtier.transfer.segment import Segment

VERSION = 1  # of what the digest is made of


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


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """See `Layout`: how an engine lays out its KV. Two engines have a chunk in common only if all of this is equal.

    *weights* is a digest or revision of the model's weights, empty if it is not known. A chunk is *chunk_tokens* tokens
    of one rank: in each of *num_planes* planes (keys and values, or both fused) and each of *num_layers* layers it has
    *width* elements for each of *num_physical_slots* tokens. The engine's own blocks have *block_size* tokens.
    """

    model: str
    weights: str
    dtype: str  # torch's name, such as "bfloat16"
    num_planes: int
    num_layers: int
    width: int
    block_size: int
    chunk_tokens: int
    num_physical_slots: int
    world_size: int

    def __post_init__(self) -> None:
        """Raise `LayoutRefused` for what no chunk can have."""
        check_fields(self)
        if self.world_size > MAX_RANKS:
            raise LayoutRefused(f"world_size is {self.world_size}; at most {MAX_RANKS} ranks are served")

    @property
    def parts(self) -> tuple[ChunkPart, ...]:
        """The one part of a chunk: all of it."""
        return (
            ChunkPart(
                self.dtype, self.num_planes, self.num_layers, self.width, self.block_size, self.num_physical_slots
            ),
        )

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return self.parts[0].num_bytes

    @property
    def digest(self) -> bytes:
        """The namespace of its chunks, 16 bytes (sha256): equal only for equal layouts."""
        running = hashlib.sha256(f"kvtier layout {VERSION}".encode())
        for field in fields(self):
            value = str(getattr(self, field.name)).encode()
            running.update(len(value).to_bytes(4, "little") + value)
        return running.digest()[:16]

    @property
    def groups(self) -> Sequence[FullAttention]:
        """One for each rank: its chunks are its own."""
        return [FullAttention(self.chunk_tokens)] * self.world_size

    def memories(self, segment: Segment, extent_bytes: int) -> Sequence[ChunkMemory]:
        """See `Layout`; by rank."""
        return memories_of(self.parts, self.world_size, self.chunk_tokens, segment, extent_bytes)

    def details(self) -> Mapping[str, object]:
        """See `Layout`."""
        return {**asdict(self), "chunk_bytes": self.chunk_bytes}
