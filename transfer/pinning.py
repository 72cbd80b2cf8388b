"""Pinning: registers ordinary host memory with CUDA, so that copies to and from it run at the bus's speed."""

from collections.abc import Callable
from functools import partial

from kvtier.transfer.host_slab import Pin


def cuda_pin() -> Pin:
    """What a `HostSlab` needs to pin its pieces; raises ImportError without CuPy."""
    from cupy.cuda import runtime

    def pin(address: int, num_bytes: int) -> Callable[[], None]:
        runtime.hostRegister(address, num_bytes, 0)
        return partial(runtime.hostUnregister, address)

    return pin
