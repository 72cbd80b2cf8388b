"""PoisonedMemory: a debug mode that fills device slots without a block with NaN, so that a wrong read shows."""

from collections.abc import Sequence

import torch

from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.delegating_memory import DelegatingMemory

# NaN in bfloat16, float16, float32 and both kinds of float8.
POISON = 0xFF


class PoisonedMemory(DelegatingMemory):
    """A `BlockMemory` that fills device slots with NaN: new ones, those passed to `poison`, and targets of copies.

    A copy or kernel that reads a slot too early, or after its content became invalid, then gets NaN. Without the
    poison it would get the former content, which is mostly right by chance. *device_blocks*, [num_slots, block_bytes]
    uint8, is the device slab of *memory*.
    """

    def __init__(self, memory: BlockMemory, device_blocks: torch.Tensor) -> None:
        super().__init__(memory)
        self._device = device_blocks
        device_blocks.fill_(POISON)

    def poison(self, device_slots: Sequence[int]) -> None:
        """Fill slots that were freed, or will be overwritten, with NaN, in stream order with the caller's kernels."""
        # One slot at a time: indexing by a list uploads the list, which may wait for compute and hide a missing event.
        for slot in device_slots:
            self._device[slot].fill_(POISON)

    def to_device(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        self.poison(device_slots)
        super().to_device(host_slots, device_slots)

    def to_device_layers(self, host_slots: Sequence[int], device_slots: Sequence[int], layers: range) -> None:
        if layers.start == 0:
            self.poison(device_slots)
        super().to_device_layers(host_slots, device_slots, layers)
