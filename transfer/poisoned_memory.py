"""PoisonedMemory: a debug mode that fills device slots without a block with NaN, so that a wrong read shows."""

from collections.abc import Sequence

import torch

from kvtier.transfer.block_memory import BlockMemory

# NaN in bfloat16, float16, float32 and both kinds of float8.
POISON = 0xFF


class PoisonedMemory:
    """A `BlockMemory` that fills new slots, slots passed to `poison`, and slots being promoted with NaN.

    A copy or kernel that reads a slot too early, or after its content became invalid, then gets NaN. Without the
    poison it would get the former content, which is mostly right by chance. *device_blocks*, [num_slots, block_bytes]
    uint8, is the device slab of *memory*.
    """

    def __init__(self, memory: BlockMemory, device_blocks: torch.Tensor) -> None:
        self.block_bytes = memory.block_bytes
        self.num_device_slots = memory.num_device_slots
        self.num_host_slots = memory.num_host_slots
        self.num_copiers = memory.num_copiers
        self.num_layers = memory.num_layers
        self._memory = memory
        self._device = device_blocks
        device_blocks.fill_(POISON)

    @property
    def prepared_bytes(self) -> int:
        return self._memory.prepared_bytes

    def poison(self, device_slots: Sequence[int]) -> None:
        """Fill slots that were freed, or will be overwritten, with NaN, in stream order with the caller's kernels."""
        # One slot at a time: indexing by a list uploads the list, which may wait for compute and hide a missing event.
        for slot in device_slots:
            self._device[slot].fill_(POISON)

    def to_host(self, device_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        self._memory.to_host(device_slots, host_slots)

    def to_device(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        self.poison(device_slots)
        self._memory.to_device(host_slots, device_slots)

    def to_device_layers(self, host_slots: Sequence[int], device_slots: Sequence[int], layers: range) -> None:
        if layers.start == 0:
            self.poison(device_slots)
        self._memory.to_device_layers(host_slots, device_slots, layers)

    def copy(self, source: int, target: int) -> None:
        self._memory.copy(source, target)

    def host_block(self, slot: int) -> memoryview:
        return self._memory.host_block(slot)

    def host_span(self) -> tuple[int, int, int]:
        return self._memory.host_span()

    def wait_prepared(self, timeout_s: float) -> bool:
        return self._memory.wait_prepared(timeout_s)

    def close(self) -> None:
        self._memory.close()
