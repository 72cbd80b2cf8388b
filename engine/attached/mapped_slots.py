"""MappedSlots: host slots in a sidecar's shared memory, for a process that has no device slots."""

import numpy as np
import numpy.typing as npt

from kvtier.transfer.host_slab import HostSlab


class MappedSlots:
    """The host slots of one attention group in a sidecar's shared memory. Implements `AttachableMemory`.

    While nothing is attached, there are no slots.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.blocks: npt.NDArray[np.uint8] = np.empty((0, block_bytes), np.uint8)  # [slot, block_bytes]
        self._slab: HostSlab | None = None

    def prepare(self, file: int, num_bytes: int) -> HostSlab:
        return HostSlab(num_bytes // self.block_bytes, self.block_bytes, file=file)

    def attach(self, prepared: HostSlab) -> None:
        self._slab, self.blocks = prepared, prepared.blocks

    def detach(self) -> None:
        self.blocks = np.empty((0, self.block_bytes), np.uint8)
        if self._slab is not None:
            self._slab.close()
            self._slab = None
