"""BlockLayout: everything besides the prompt that determines the bytes of a kvtier engine's blocks."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvtier.sidecar.layout import MAX_SLOTS, LayoutRefused
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.lower.name_set import NAMESPACE_BYTES
from kvtier.transfer.segment import Segment

VERSION = 1  # of the digest's input
MAX_GROUPS = 64
MAX_TOKENS = 1 << 20  # per block
MAX_MODEL_CHARACTERS = 256


class BlockSlots:
    """The slots for blocks of one size in the segment (host memory that engines map), see `SlotMemory`.

    Slot s begins at byte s * *block_bytes* of the segment, so an engine can map all slots as one array. The segment is
    cut into extents. A slot that crosses the end of an extent is not used.
    """

    num_copiers = 1

    def __init__(self, segment: Segment, extent_bytes: int, block_bytes: int) -> None:
        """Create the slots.

        *block_bytes* must divide *extent_bytes* or be at most half of it, so that every extent has at least one slot.
        """
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


class BlockShape(NamedTuple):
    """A group of blocks (see `BlockGroup`), each with *block_size* tokens and *block_bytes* bytes."""

    block_size: int
    forgets: bool
    block_bytes: int
    keeps_states: bool = False


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of a kvtier engine, see `Layout`.

    The engine computes *namespace*, a digest (16 bytes) of everything except the prompt that determines the bytes of a
    block, such as the model's weights.
    """

    namespace: bytes
    model: str = field(compare=False)
    groups: tuple[BlockShape, ...]

    def __post_init__(self) -> None:
        """Raise `LayoutRefused` for values that no block can have."""
        if len(self.namespace) != NAMESPACE_BYTES:
            raise LayoutRefused(f"a namespace has {NAMESPACE_BYTES} bytes, not {len(self.namespace)}")
        if len(self.model) > MAX_MODEL_CHARACTERS or not self.model.isprintable():
            raise LayoutRefused(f"a model's name has at most {MAX_MODEL_CHARACTERS} characters, all of them printable")
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise LayoutRefused(f"{len(self.groups)} groups of blocks; 1 to {MAX_GROUPS} are served")
        for group in self.groups:
            if not 1 <= group.block_size <= MAX_TOKENS or group.block_bytes < 1:
                raise LayoutRefused(f"blocks of {group.block_size} tokens and {group.block_bytes} bytes are invalid")

    @property
    def weights(self) -> str:
        return f"namespace {self.namespace.hex()}"

    @property
    def digest(self) -> bytes:
        """Digest of the namespace and the groups. Engines with the same namespace may still have different groups."""
        shapes = "".join(
            f" {group.block_size} {int(group.forgets)} {group.block_bytes}{' states' if group.keeps_states else ''}"
            for group in self.groups
        )
        return hashlib.sha256(f"kvtier blocks {VERSION}".encode() + self.namespace + shapes.encode()).digest()[:16]

    def memories(self, segment: Segment, extent_bytes: int) -> Sequence[BlockSlots]:
        for group in self.groups:
            if extent_bytes % group.block_bytes and 2 * group.block_bytes > extent_bytes:
                raise LayoutRefused(
                    f"a block has {group.block_bytes} bytes, but an extent has {extent_bytes}; start the sidecar with "
                    f"extents of {2 * group.block_bytes} bytes or more (set `extent` in its configuration)"
                )
        num_slots = sum(segment.num_bytes // group.block_bytes for group in self.groups)
        if num_slots > MAX_SLOTS:
            raise LayoutRefused(
                f"the host memory would have {num_slots} slots for these blocks, but the limit is {MAX_SLOTS}; use "
                "larger blocks, or less host memory"
            )
        return [BlockSlots(segment, extent_bytes, group.block_bytes) for group in self.groups]

    def details(self) -> Mapping[str, object]:
        return {
            "namespace": self.namespace.hex(),
            "groups": [group._asdict() for group in self.groups],
            "chunk_bytes": sum(group.block_bytes for group in self.groups),  # one block of each group
        }
