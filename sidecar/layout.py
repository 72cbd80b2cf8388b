"""Layout: the model and the KV format of an engine, which the sidecar needs to store the engine's blocks."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.groups import BlockGroup
from kvtier.transfer.block_memory import HostMemory
from kvtier.transfer.segment import Segment

MAX_SLOTS = 1 << 22  # of all groups of a layout; each costs about fifty bytes in addition to the segment


class LayoutRefused(ValueError):
    """Error for a layout whose blocks the sidecar cannot store. The message says why, and what to do."""


class SlotMemory(HostMemory, Protocol):
    """The slots for blocks of one size in the segment, which is host memory that engines map.

    Slots are numbered through the whole segment. A slot may be used only while its extent, a fixed part of the segment,
    is assigned to this memory; see `Extents`.
    """

    @property
    def slot_bytes(self) -> int:
        """Number of bytes of the segment that one slot takes."""

    def offset(self, slot: int) -> int:
        """Return the offset of the slot's first byte in the segment."""

    def slots_of(self, extent: int) -> Ids:
        """Return the slots that lie completely in the extent (part of host memory) with this number."""

    def extent_of_each(self, slots: Ids) -> Ids:
        """Return for each of these slots the number of the extent (part of host memory) in which it begins."""

    def extents_of(self, slots: Ids) -> list[int]:
        """Return the numbers of the extents (parts of host memory) in which these slots begin, without duplicates."""


class Layout(Protocol):
    """The facts besides the prompt that determine the bytes of a block, such as model, weights and KV format.

    Two engines share blocks only if their layouts are equal. Equal layouts have the same hash and the same digest.
    """

    @property
    def model(self) -> str:
        """Name of the model, as the engine reports it."""

    @property
    def weights(self) -> str:
        """Text that identifies the model's weights, for display; empty if the weights are unknown."""

    @property
    def digest(self) -> bytes:
        """Digest of the layout, 16 bytes. It is the namespace of the layout's blocks on disk."""

    @property
    def groups(self) -> Sequence[BlockGroup]:
        """Groups of blocks, for example one for each rank. Each group has slots of its own."""

    def memories(self, segment: Segment, extent_bytes: int) -> Sequence[SlotMemory]:
        """Return the slots of each group. Raise `LayoutRefused` if a block does not fit in an extent."""

    def details(self) -> Mapping[str, object]:
        """Return the layout's fields for display, as JSON values. One of them is *chunk_bytes*."""
