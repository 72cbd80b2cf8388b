"""A CUDA device without CUDA: streams that are really asynchronous, memory that knows who touches it, and no mercy.

`installed` puts it in the place of what `transfer/cuda` calls: torch's streams, events, device tensors and runtime,
NVIDIA's bindings and CuPy. What is enqueued runs as late as streams and events allow (or, by a seed, some of it at
once); two operations on the same memory that nothing orders are an error whatever ran first. Nothing reads a clock.
"""

from fake_cuda.device import CudaMisuse, FakeDevice
from fake_cuda.installation import installed
from fake_cuda.schedules import Late, Schedule, Seeded

__all__ = ["CudaMisuse", "FakeDevice", "Late", "Schedule", "Seeded", "installed"]
