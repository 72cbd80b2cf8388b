"""Layout: what the sidecar has to know of the blocks of one kind of engine to keep them."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.groups import BlockGroup
from kvtier.transfer.host_memory import HostMemory
from kvtier.transfer.segment import Segment

MAX_SLOTS = 1 << 22  # of all groups of a layout: each costs some fifty bytes beside the segment


class LayoutRefused(ValueError):
    """The sidecar cannot keep blocks of this layout; the message says why, and what to do."""


class SlotMemory(HostMemory, Protocol):
    """The slots that a segment has for blocks of one size. The segment is cut into extents of equal size, and a slot is
    of use while its extent is this memory's, which is not known here (`Extents`)."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of the segment that a slot takes."""

    def offset(self, slot: int) -> int:
        """Where the slot's bytes begin in the segment."""

    def slots_of(self, extent: int) -> Ids:
        """The slots that lie in that extent with all their bytes."""

    def extent_of_each(self, slots: Ids) -> Ids:
        """For each of these slots the extent that it begins in."""

    def extents_of(self, slots: Ids) -> list[int]:
        """The same, each extent once."""


class Layout(Protocol):
    """What decides the bytes of a block beside its prompt. Two engines have blocks in common only if they are equal in
    all of it: equal layouts compare and hash as equal, and have the same digest."""

    @property
    def model(self) -> str:
        """The model's name, for people."""

    @property
    def weights(self) -> str:
        """What tells the model's weights from others, for people; empty if nothing does."""

    @property
    def digest(self) -> bytes:
        """The namespace of its blocks on disk, 16 bytes."""

    @property
    def groups(self) -> Sequence[BlockGroup]:
        """The groups of blocks that are kept apart, and find slots of their own."""

    def memories(self, segment: Segment, extent_bytes: int) -> Sequence[SlotMemory]:
        """The slots of each group. `LayoutRefused` if a block has no place in an extent."""

    def details(self) -> Mapping[str, object]:
        """The rest of it, for people, as what JSON can say; *chunk_bytes* among it."""
