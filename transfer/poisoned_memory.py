"""PoisonedMemory: fills unused device slots with NaN, to reveal code that reads a slot at the wrong time."""

from collections.abc import Sequence

import torch

from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.delegating_memory import DelegatingMemory

# NaN in bfloat16, float16, float32 and both kinds of float8.
POISON = 0xFF


class PoisonedMemory(DelegatingMemory):
    """A `BlockMemory` for debugging, which fills device slots with NaN while they hold no valid block.

    A copy or kernel that reads such a slot too early or too late gets NaN. Otherwise it would get the slot's old
    content, which is often right by chance. Slots are filled at the start, by `poison`, and before a block is copied
    to them. *device_blocks*, [num_slots, block_bytes] uint8, is the device memory of *memory*.
    """

    def __init__(self, memory: BlockMemory, device_blocks: torch.Tensor) -> None:
        super().__init__(memory)
        self._device = device_blocks
        device_blocks.fill_(POISON)

    def poison(self, device_slots: Sequence[int]) -> None:
        """Fill slots with NaN, on the current CUDA stream. Call this when slots are freed or before they are reused."""
        # One slot at a time: indexing by a list uploads the list, which may wait for kernels and hide a race.
        for slot in device_slots:
            self._device[slot].fill_(POISON)

    def to_device(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        self.poison(device_slots)
        super().to_device(host_slots, device_slots)

    def to_device_layers(self, host_slots: Sequence[int], device_slots: Sequence[int], layers: range) -> None:
        if layers.start == 0:
            self.poison(device_slots)
        super().to_device_layers(host_slots, device_slots, layers)
