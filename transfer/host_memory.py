"""HostMemory: the host slots of one attention group, which are all that the tiers below the device need of a memory."""

from typing import Protocol


class HostMemory(Protocol):
    """Slots of equal size in host memory. The bytes of a slot belong to the owner of its lease."""

    block_bytes: int
    num_host_slots: int
    num_copiers: int  # threads that should copy in one direction at a time: while one verifies, another copies

    def host_block(self, slot: int) -> memoryview:
        """The bytes of a host slot, writable, [block_bytes]."""
