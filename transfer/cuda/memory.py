"""CudaMemory: device slots on a GPU, and host slots in memory that a background thread pins."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvtier.transfer.block_memory import Slots, layer_bytes, slot_pairs
from kvtier.transfer.cuda.copies import BatchCopies, Ends, LoopCopies
from kvtier.transfer.cuda.copy_choice import COPIES, CopyChoice, CopyMethod, choose_copies, num_trial_blocks
from kvtier.transfer.host_slab import HostSlab, Pin
from kvtier.transfer.pages import node_of_device

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs of the process
# A registration holds a driver lock for which every other CUDA call waits. If two slabs pinned at once, those calls
# would wait twice as long.
_one_at_a_time = threading.Lock()
log = logging.getLogger(__name__)

TRIAL_WAIT_S = 2.0  # limit on waiting for the trial's memory to be pinned; after it, unpinned memory is measured


def cuda_pin(device: torch.device) -> Pin:
    """Return a function that pins pieces of a `HostSlab` for *device*.

    The returned function raises RuntimeError on a CUDA error.
    """
    # Torch's binding, because CuPy may be missing.
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # untyped in torch

    def unpin(address: int) -> None:
        with torch.cuda.device(device):
            cudart.cudaHostUnregister(address)

    def pin(address: int, num_bytes: int) -> Callable[[], None]:
        with _one_at_a_time, torch.cuda.device(device):  # a fresh thread would open a context on GPU 0
            error = int(cudart.cudaHostRegister(address, num_bytes, _PORTABLE))
        if error:
            raise RuntimeError(
                f"cudaHostRegister of {num_bytes} bytes failed with CUDA error {error}; "
                "raise the locked-memory limit (ulimit -l)"
            )
        return lambda: unpin(address)

    return pin


def node_of_gpu(device: torch.device) -> int | None:
    """Return the NUMA node closest to the GPU; None if unknown or if the machine has only one node."""
    properties = torch.cuda.get_device_properties(device)
    domain = properties.pci_domain_id  # type: ignore[attr-defined]  # there, but not in torch's stubs
    bus = properties.pci_bus_id  # type: ignore[attr-defined]
    slot = properties.pci_device_id  # type: ignore[attr-defined]
    return node_of_device(f"{domain:04x}:{bus:02x}:{slot:02x}.0")


class CudaMemory:
    """A `BlockMemory` on a GPU. Its device slots are *device_blocks*, [num_slots, block_bytes] uint8.

    Copies run on the calling thread's current stream (the stream of a `CudaLane`), and wait until the bytes are in
    place. Only `copy` does not wait, because the computing thread calls it.

    *way* is the name of a copy method in `COPIES`, or an earlier result of `choose_methods`. By default, the copy
    methods are measured and the fastest are chosen. `choice` holds the chosen methods and their speeds; it is None if
    *way* is a name or if there are no host slots. If the file descriptor *file* is given, the host slots are at the
    beginning of that file; see `HostSlab`.
    """

    num_copiers = 4  # a digest runs at about half the speed of the bus; bench/transfer/gpu_copies.py measures 1 to 8

    def __init__(
        self,
        device_blocks: torch.Tensor,
        num_host_slots: int,
        num_layers: int = 1,
        way: str | CopyChoice | None = None,
        file: int | None = None,
    ) -> None:
        self.num_device_slots, self.block_bytes = device_blocks.shape
        self.num_layers = num_layers
        self.num_host_slots = num_host_slots
        self._device = device_blocks
        gpu = device_blocks.device
        if num_host_slots and way is None:  # before the live slots are pinned, because pinning slows the trial down
            way = choose_methods(self.block_bytes, gpu)
        self.choice = way if isinstance(way, CopyChoice) else None
        down, up = (way.down, way.up) if isinstance(way, CopyChoice) else (way or "loop",) * 2
        self._slab = HostSlab(num_host_slots, self.block_bytes, cuda_pin(gpu), node_of_gpu(gpu), file)
        ends = Ends(device_blocks, torch.from_numpy(self._slab.blocks), self._slab.slots_per_piece)
        try:
            self._down, self._up, self._unpinned = COPIES[down](ends), COPIES[up](ends), LoopCopies(ends)
            self._up_layers = BatchCopies(ends) if up == "batch" else self._unpinned
        except BaseException:
            self._slab.close()  # otherwise its memory stays pinned, and no later mapping there can be pinned
            raise

    @property
    def prepared_bytes(self) -> int:
        return self._slab.prepared_bytes

    def to_host(self, device_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        device, host = slot_pairs(device_slots, host_slots, self.num_device_slots, self.num_host_slots)
        pinned = self._are_pinned(host)
        self._down.to_host(device[pinned], host[pinned])
        if not pinned.all():
            self._unpinned.to_host(device[~pinned], host[~pinned])

    def to_device(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        device, host = slot_pairs(device_slots, host_slots, self.num_device_slots, self.num_host_slots)
        pinned = self._are_pinned(host)
        self._up.to_device(host[pinned], device[pinned])
        if not pinned.all():
            self._unpinned.to_device(host[~pinned], device[~pinned])

    def to_device_layers(self, host_slots: Sequence[int], device_slots: Sequence[int], layers: range) -> None:
        device, host = slot_pairs(device_slots, host_slots, self.num_device_slots, self.num_host_slots)
        part = layer_bytes(layers, self.num_layers, self.block_bytes)
        pinned = self._are_pinned(host)
        self._up_layers.to_device_part(host[pinned], device[pinned], part)
        if not pinned.all():
            self._unpinned.to_device_part(host[~pinned], device[~pinned], part)

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

    def _are_pinned(self, host: Slots) -> npt.NDArray[np.bool_]:
        """Return which slots are pinned. A slot that is pinned after this check is still copied the slower way."""
        self._slab.copied = True
        return host < self._slab.num_pinned_slots


def methods_for(is_pinned: bool) -> Mapping[str, CopyMethod]:
    """Return the copy methods to try, depending on whether all host memory is pinned.

    Without pinned memory, the kernel is left out: reading unpinned memory would destroy the CUDA context of the
    process.
    """
    return COPIES if is_pinned else {name: way for name, way in COPIES.items() if name != "kernel"}


def choose_methods(block_bytes: int, gpu: torch.device) -> CopyChoice:
    """Measure the copy methods for blocks of *block_bytes*, on scratch memory like that of the real slots."""
    num_blocks = num_trial_blocks(block_bytes)
    slab = HostSlab(num_blocks, block_bytes, cuda_pin(gpu), node_of_gpu(gpu))
    try:
        slab.wait_prepared(TRIAL_WAIT_S)
        device_blocks = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=gpu)
        ends = Ends(device_blocks, torch.from_numpy(slab.blocks), slab.slots_per_piece)
        choice = choose_copies(methods_for(slab.num_pinned_slots == num_blocks), ends)
    finally:
        slab.close()
    log.info("block copies of %d bytes: chose %s", block_bytes, choice)
    return choice
