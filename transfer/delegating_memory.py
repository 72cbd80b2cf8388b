"""DelegatingMemory: the base class of memories that wrap another memory."""

from collections.abc import Sequence

from kvtier.transfer.block_memory import BlockMemory


class DelegatingMemory:
    """A `BlockMemory` that passes every call on to *memory*. A subclass overrides the methods that it changes.

    A subclass may assign another memory with the same device slots to the attribute `memory`.
    """

    def __init__(self, memory: BlockMemory) -> None:
        self.block_bytes = memory.block_bytes
        self.num_device_slots = memory.num_device_slots
        self.num_host_slots = memory.num_host_slots
        self.num_copiers = memory.num_copiers
        self.num_layers = memory.num_layers
        self.memory = memory

    @property
    def prepared_bytes(self) -> int:
        return self.memory.prepared_bytes

    def to_host(self, device_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        self.memory.to_host(device_slots, host_slots)

    def to_device(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        self.memory.to_device(host_slots, device_slots)

    def to_device_layers(self, host_slots: Sequence[int], device_slots: Sequence[int], layers: range) -> None:
        self.memory.to_device_layers(host_slots, device_slots, layers)

    def copy(self, source: int, target: int) -> None:
        self.memory.copy(source, target)

    def host_block(self, slot: int) -> memoryview:
        return self.memory.host_block(slot)

    def host_span(self) -> tuple[int, int, int]:
        return self.memory.host_span()

    def wait_prepared(self, timeout_s: float) -> bool:
        return self.memory.wait_prepared(timeout_s)

    def close(self) -> None:
        self.memory.close()
