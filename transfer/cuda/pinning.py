"""Pinning: registers ordinary host memory with CUDA, so that copies to and from it run at the bus's speed."""

import threading
from collections.abc import Callable

import torch

from kvtier.transfer.host_slab import Pin
from kvtier.transfer.pages import node_of_device

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process
# A registration holds a lock of the driver's, for which every other CUDA call waits: two slabs that pin at once would
# make it wait twice as long.
_one_at_a_time = threading.Lock()


def cuda_pin(device: torch.device) -> Pin:
    """A function by which a `HostSlab` pins its pieces for *device*. It raises RuntimeError if CUDA refuses."""
    # Torch's own binding: CuPy's does the same, and host memory would stay unpinned where CuPy is missing.
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # untyped in torch

    def unpin(address: int) -> None:
        with torch.cuda.device(device):
            cudart.cudaHostUnregister(address)

    def pin(address: int, num_bytes: int) -> Callable[[], None]:
        with _one_at_a_time, torch.cuda.device(device):  # a fresh thread would open a context on GPU 0
            error = int(cudart.cudaHostRegister(address, num_bytes, _PORTABLE))
        if error:
            raise RuntimeError(f"cudaHostRegister of {num_bytes} bytes: CUDA error {error}; see `ulimit -l`")
        return lambda: unpin(address)

    return pin


def node_of_gpu(device: torch.device) -> int | None:
    """The memory node next to the GPU; None if it is unknown or the machine has only one."""
    properties = torch.cuda.get_device_properties(device)
    domain = properties.pci_domain_id  # type: ignore[attr-defined]  # there, but not in torch's stubs
    bus = properties.pci_bus_id  # type: ignore[attr-defined]
    slot = properties.pci_device_id  # type: ignore[attr-defined]
    return node_of_device(f"{domain:04x}:{bus:02x}:{slot:02x}.0")
