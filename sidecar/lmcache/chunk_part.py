"""ChunkPart: the part of an LMCache client's chunk that belongs to one KV cache group."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod

import numpy as np

from kvtier.sidecar.layout import MAX_SLOTS, LayoutRefused
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.groups import AttentionGroup, FullAttention, SlidingWindow
from kvtier.transfer.segment import Segment

MAX_RANKS = 64
ELEMENT_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


class ChunkMemory:
    """The slots for chunks of one size in the segment, see `SlotMemory`.

    The segment (the shared host memory) consists of extents of equal size. Each extent is divided into the same number
    of slots, which begin at page boundaries. Slots are numbered consecutively through the whole segment.
    """

    num_copiers = 1

    def __init__(self, segment: Segment, extent_bytes: int, chunk_bytes: int) -> None:
        """Create the slots. Each extent (part of *segment*) has *extent_bytes*: whole pages, at least *chunk_bytes*."""
        self.block_bytes = chunk_bytes
        self._extent_bytes = extent_bytes
        self._stride = -(-chunk_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.slots_per_extent = extent_bytes // self._stride
        self.num_host_slots = self.slots_per_extent * (segment.num_bytes // extent_bytes)
        self._bytes = memoryview(segment.memory.data)

    @property
    def slot_bytes(self) -> int:
        """Number of bytes that a slot takes, including its share of the unused bytes at the end of an extent."""
        return self._extent_bytes // self.slots_per_extent

    def offset(self, slot: int) -> int:
        extent, place = divmod(slot, self.slots_per_extent)
        return extent * self._extent_bytes + place * self._stride

    def host_block(self, slot: int) -> memoryview:
        offset = self.offset(slot)
        return self._bytes[offset : offset + self.block_bytes]

    def slots_of(self, extent: int) -> Ids:
        first = extent * self.slots_per_extent
        return np.arange(first, first + self.slots_per_extent)

    def extent_of_each(self, slots: Ids) -> Ids:
        return slots // self.slots_per_extent

    def extents_of(self, slots: Ids) -> list[int]:
        return [int(extent) for extent in np.unique(self.extent_of_each(slots))]


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """The last *num_tokens* tokens of a chunk in one KV cache group.

    This part is a tensor with the dimensions *num_planes* (2 for keys and values, 1 if both are fused), *num_layers*,
    *num_tokens* and *width*.

    *window_chunks* is the attention window in chunks, or 0 if there is none. With a window, an engine that loads a hit
    needs this part only of the hit's last *window_chunks* chunks. Otherwise, it needs this part of all chunks.

    The engine's own blocks have *block_size* tokens. If *is_recurrent*, the blocks are recurrent states, which the
    sidecar stores like any other bytes.
    """

    dtype: str  # torch's name, such as "bfloat16"
    num_planes: int
    num_layers: int
    width: int
    block_size: int
    num_tokens: int
    window_chunks: int = 0
    is_recurrent: bool = False

    @property
    def shape(self) -> list[int]:
        """Shape of the tensor: *num_planes* (left out if it is 1), *num_layers*, *num_tokens* and *width*."""
        shape = [self.num_layers, self.num_tokens, self.width]
        return shape if self.num_planes == 1 else [self.num_planes, *shape]

    @property
    def num_bytes(self) -> int:
        """Number of bytes that this part takes in each chunk."""
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]

    def group(self, chunk_tokens: int) -> AttentionGroup:
        """Return the attention group of this part. It determines which chunks of a prefix a hit needs."""
        if self.window_chunks:
            return SlidingWindow(chunk_tokens, self.window_chunks * chunk_tokens)
        return FullAttention(chunk_tokens)


def check_fields(values: object) -> None:
    """Raise `LayoutRefused` if the dtype or a number in the dataclass *values* is invalid."""
    for field in fields(values):  # type: ignore[arg-type]
        value = getattr(values, field.name)
        if field.name == "dtype" and value not in ELEMENT_BYTES:
            raise LayoutRefused(f"dtype {value!r} is not known; use one of {', '.join(ELEMENT_BYTES)}")
        if field.name != "window_chunks" and type(value) is int and not 1 <= value < 1 << 31:
            raise LayoutRefused(f"{field.name} is {value}; it must be from 1 to 2147483647")


def memories_of(
    parts: Sequence[ChunkPart], num_ranks: int, chunk_tokens: int, segment: Segment, extent_bytes: int
) -> Sequence[ChunkMemory]:
    """Return the memory for each of *parts* (one for each KV cache group) in each rank, in the order of the ranks.

    Raises `LayoutRefused` if that does not fit in host memory.
    """
    for part in parts:
        if part.num_bytes > extent_bytes:
            raise LayoutRefused(
                f"a chunk of {chunk_tokens} tokens is larger than an extent: its size in bytes is {part.num_bytes}, "
                f"that of an extent {extent_bytes}; start the sidecar with fewer tokens in a chunk (chunk_tokens), "
                "or a larger extent"
            )
    memories = [ChunkMemory(segment, extent_bytes, part.num_bytes) for _ in range(num_ranks) for part in parts]
    num_slots = sum(memory.num_host_slots for memory in memories)
    if num_slots > MAX_SLOTS:  # check before the bookkeeping of any rank is allocated
        raise LayoutRefused(
            f"chunks of {chunk_tokens} tokens are too small ({sum(part.num_bytes for part in parts)} bytes): all ranks "
            f"would have {num_slots} slots in total in host memory, but the limit is {MAX_SLOTS}; "
            "start the sidecar with more tokens in a chunk (chunk_tokens), or less host memory"
        )
    num_extents = segment.num_bytes // extent_bytes
    if len(memories) > num_extents:
        raise LayoutRefused(
            "host memory has too few extents for this engine: "
            f"it needs {len(memories)}, one for each of {len(parts)} KV cache groups in each of {num_ranks} ranks, "
            f"and host memory has {num_extents} of {extent_bytes} bytes; start the sidecar with more host memory, or a "
            "smaller extent"
        )
    return memories
