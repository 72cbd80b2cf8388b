"""Pinning: registers ordinary host memory with CUDA, so that copies to and from it run at the bus's speed."""

from collections.abc import Callable


def cuda_register() -> Callable[[int, int], None]:
    """A function that pins *num_bytes* of host memory at an address; raises ImportError without CuPy."""
    from cupy.cuda import runtime

    def register(address: int, num_bytes: int) -> None:
        runtime.hostRegister(address, num_bytes, 0)

    return register
