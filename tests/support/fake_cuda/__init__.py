"""A CUDA device without CUDA: asynchronous streams, memory that knows which operations touch it, and no mercy.

`installed` puts it in the place of what `transfer/cuda` calls: torch's streams, events, device tensors and runtime,
NVIDIA's bindings and CuPy. Operations run as late as streams and events allow (or, by a seed, some of them at once).
Two operations on the same memory that nothing orders are an error, whichever ran first. It reads no clock.
"""

from fake_cuda.device import CudaMisuse, FakeDevice
from fake_cuda.installation import installed
from fake_cuda.schedules import Late, Schedule, Seeded

__all__ = ["CudaMisuse", "FakeDevice", "Late", "Schedule", "Seeded", "installed"]
