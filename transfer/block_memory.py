"""BlockMemory: the device and host memory of one attention group, and the copies between their slots."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.transfer.host_slab import HostSlab

Slots = npt.NDArray[np.int64]  # [num_blocks]


class HostMemory(Protocol):
    """Slots in host memory, each with room for one block. The bytes of a slot belong to the owner of its lease."""

    block_bytes: int
    num_host_slots: int
    num_copiers: int  # recommended threads per direction: while one verifies, another copies

    def host_block(self, slot: int) -> memoryview:
        """Return a writable view of a host slot, [block_bytes]."""


class BlockMemory(HostMemory, Protocol):
    """Device and host slots of one attention group. A block has the same bytes in both.

    Threads of lanes (queues of transfers) call the copy methods, several at once, while the source and target slots are
    leased. A copy method returns when the bytes are in place. It raises ValueError if the numbers of slots differ, and
    IndexError if a slot does not exist.
    """

    num_device_slots: int
    num_layers: int  # of the group; the layers lie in a block one after the other, with equal sizes

    @property
    def prepared_bytes(self) -> int:
        """Size of the host slots that have physical memory already and, with CUDA, are pinned.

        The other slots work too, but copies from and to them are slower.
        """

    def to_host(self, device_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        """Copy each device slot to the host slot at the same position in *host_slots*."""

    def to_device(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        """Copy each host slot to the device slot at the same position in *device_slots*."""

    def to_device_layers(self, host_slots: Sequence[int], device_slots: Sequence[int], layers: range) -> None:
        """Copy the consecutive *layers* of each block; otherwise the same as `to_device`."""

    def copy(self, source: int, target: int) -> None:
        """Copy one device slot to another, in order with the kernels on the calling thread's stream."""

    def host_span(self) -> tuple[int, int, int]:
        """Return the file of the host slots, which other processes can map.

        Returns:
            The file descriptor, the address in this process, and the number of bytes.
        """

    def wait_prepared(self, timeout_s: float) -> bool:
        """Wait up to *timeout_s* until all host slots are prepared (`prepared_bytes`); return whether they are."""

    def close(self) -> None:
        """Release the host slots."""


def slot_pairs(
    device_slots: Sequence[int], host_slots: Sequence[int], num_device_slots: int, num_host_slots: int
) -> tuple[Slots, Slots]:
    """Check the slots of a copy, and return them as two arrays in the given order.

    A wrong slot would be a wrong address, and would corrupt memory without an immediate error.

    Raises:
        ValueError: The numbers of device and host slots differ.
        IndexError: A slot does not exist.
    """
    device, host = np.asarray(device_slots, np.int64), np.asarray(host_slots, np.int64)
    if len(device) != len(host):
        raise ValueError(f"copy: got {len(device)} device slots and {len(host)} host slots; give equal numbers")
    for side, slots, num_slots in (("device", device, num_device_slots), ("host", host, num_host_slots)):
        if len(slots) and not 0 <= slots.min() <= slots.max() < num_slots:
            raise IndexError(
                f"copy: got {side} slots {slots.min()} to {slots.max()}; give slots from 0 to {num_slots - 1}"
            )
    return device, host


def layer_bytes(layers: range, num_layers: int, block_bytes: int) -> slice:
    """Return the range of bytes that *layers* occupy in a block."""
    each = block_bytes // num_layers
    return slice(layers.start * each, layers.stop * each)


class CpuMemory:
    """A `BlockMemory` without a GPU. Its device slots are *device_blocks*, [num_slots, block_bytes] uint8.

    If the file descriptor *file* is given, the host slots are at the beginning of that file; see `HostSlab`.
    """

    num_copiers = 1  # one thread saturates memory

    def __init__(
        self,
        device_blocks: npt.NDArray[np.uint8],
        num_host_slots: int,
        num_layers: int = 1,
        file: int | None = None,
    ) -> None:
        self.num_device_slots, self.block_bytes = device_blocks.shape
        self.num_host_slots = num_host_slots
        self.num_layers = num_layers
        self._device = device_blocks
        self._host = HostSlab(num_host_slots, self.block_bytes, file=file)

    @property
    def prepared_bytes(self) -> int:
        return self._host.prepared_bytes

    def to_host(self, device_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        # A loop over rows runs at memcpy's speed; fancy indexing on both sides allocates and reaches 0.1 to 0.6 of it.
        device, host = slot_pairs(device_slots, host_slots, self.num_device_slots, self.num_host_slots)
        for source, target in zip(device.tolist(), host.tolist(), strict=True):
            np.copyto(self._host.blocks[target], self._device[source])

    def to_device(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        device, host = slot_pairs(device_slots, host_slots, self.num_device_slots, self.num_host_slots)
        for source, target in zip(host.tolist(), device.tolist(), strict=True):
            np.copyto(self._device[target], self._host.blocks[source])

    def to_device_layers(self, host_slots: Sequence[int], device_slots: Sequence[int], layers: range) -> None:
        device, host = slot_pairs(device_slots, host_slots, self.num_device_slots, self.num_host_slots)
        part = layer_bytes(layers, self.num_layers, self.block_bytes)
        for source, target in zip(host.tolist(), device.tolist(), strict=True):
            np.copyto(self._device[target, part], self._host.blocks[source, part])

    def copy(self, source: int, target: int) -> None:
        np.copyto(self._device[target], self._device[source])

    def host_block(self, slot: int) -> memoryview:
        return memoryview(self._host.blocks[slot])

    def host_span(self) -> tuple[int, int, int]:
        return self._host.span

    def wait_prepared(self, timeout_s: float) -> bool:
        return self._host.wait_prepared(timeout_s)

    def close(self) -> None:
        self._host.close()
