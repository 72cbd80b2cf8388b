"""CudaMemory: device slots on a GPU, host slots in memory that is being pinned in the background."""

import logging
from collections.abc import Sequence

import torch

from kvtier.transfer.host_slab import HostSlab
from kvtier.transfer.pinning import cuda_pin

log = logging.getLogger(__name__)


class CudaMemory:
    """`device_blocks` is a [num_slots, block_bytes] uint8 view of the slab on the GPU.

    The copies run on the calling thread's current stream (a `CudaLane`'s) and wait for it before they return; `copy`,
    called by the thread that computes, does not wait.
    """

    def __init__(self, device_blocks: torch.Tensor, num_host_slots: int) -> None:
        self.num_device_slots, self.block_bytes = device_blocks.shape
        self.num_host_slots = num_host_slots
        self._device = device_blocks
        try:
            pin = cuda_pin()
        except ImportError:
            log.warning("host memory stays unpinned, copies are slower: CuPy is missing; install kvtier[cuda13]")
            pin = None
        self._slab = HostSlab(num_host_slots, self.block_bytes, pin)
        self._host = torch.from_numpy(self._slab.blocks)

    def to_host(self, device_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        for source, target in zip(device_slots, host_slots, strict=True):
            self._host[target].copy_(self._device[source], non_blocking=True)
        torch.cuda.current_stream(self._device.device).synchronize()

    def to_device(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        for source, target in zip(host_slots, device_slots, strict=True):
            self._device[target].copy_(self._host[source], non_blocking=True)
        torch.cuda.current_stream(self._device.device).synchronize()

    def copy(self, source: int, target: int) -> None:
        self._device[target].copy_(self._device[source], non_blocking=True)

    def host_block(self, slot: int) -> memoryview:
        return memoryview(self._slab.blocks[slot])

    def host_span(self) -> tuple[int, int, int]:
        return self._slab.span

    def wait_prepared(self, timeout_s: float) -> bool:
        return self._slab.wait_prepared(timeout_s)

    def close(self) -> None:
        self._slab.close()
