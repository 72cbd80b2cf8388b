"""HostMemory: the host slots of one attention group, the only memory that the tiers below the device use."""

from typing import Protocol


class HostMemory(Protocol):
    """Slots of equal size in host memory. The bytes of a slot belong to the owner of its lease."""

    block_bytes: int
    num_host_slots: int
    num_copiers: int  # recommended threads per direction: while one verifies, another copies

    def host_block(self, slot: int) -> memoryview:
        """Return a writable view of a host slot, [block_bytes]."""
