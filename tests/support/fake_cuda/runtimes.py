"""The libraries that `transfer/cuda` calls with addresses, on a fake device: cudart, NVIDIA's bindings and CuPy."""

import ctypes
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from types import SimpleNamespace

from fake_cuda.device import FakeDevice
from fake_cuda.host_kernel import HostKernel
from fake_cuda.spans import Spans
from fake_cuda.tensors import BUS_BYTES_PER_S

INVALID_VALUE = 1  # cudaErrorInvalidValue
_WORD_BYTES = 16


class SourceAccessOrder(IntEnum):
    """The numbers of `cudaMemcpySrcAccessOrder`."""

    STREAM = 1
    DURING_API_CALL = 2
    ANY = 3


class Cudart:
    """Stands for what `torch.cuda.cudart()` gives."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        return self._device.register(address, num_bytes)

    def cudaHostUnregister(self, address: int) -> int:
        return self._device.unregister(address)


class Bindings:
    """Stands for `cuda.bindings.runtime` of CUDA 13."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.cudaError_t = SimpleNamespace(cudaSuccess=0)
        self.cudaMemcpyAttributes = SimpleNamespace
        self.cudaMemcpySrcAccessOrder = SourceAccessOrder

    def cudaMemcpyBatchAsync(
        self,
        targets: Sequence[int],
        sources: Sequence[int],
        sizes: Sequence[int],
        count: int,
        attributes: Sequence[SimpleNamespace],
        first_of_attributes: Sequence[int],
        num_attributes: int,
        stream: int,
    ) -> tuple[int]:
        """Enqueue the copies, to run in reverse: nothing orders them among each other."""
        is_complete = len(targets) == len(sources) == len(sizes) == count > 0 and all(sizes)
        if not is_complete or (list(first_of_attributes), num_attributes) != ([0], 1) or stream == 0:
            return (INVALID_VALUE,)
        if not all(map(self._is_a_copy, targets, sources, sizes)):
            return (INVALID_VALUE,)
        copies = list(zip(targets, sources, sizes, strict=True))
        reads = tuple((source, source + size) for source, size in zip(sources, sizes, strict=True))
        writes = tuple((target, target + size) for target, size in zip(targets, sizes, strict=True))
        order = attributes[0].srcAccessOrder
        if order == SourceAccessOrder.DURING_API_CALL:
            raise NotImplementedError("the fake device reads a batch's sources in stream order or at any time")

        def run() -> None:
            for target, source, size in reversed(copies):
                ctypes.memmove(target, source, size)

        self._device.enqueue(
            self._device.stream(stream),
            "a batch of copies",
            run,
            writes=writes,
            seconds=sum(sizes) / BUS_BYTES_PER_S,
            **{"unordered_reads" if order == SourceAccessOrder.ANY else "reads": reads},
        )
        return (0,)

    def _is_a_copy(self, target: int, source: int, size: int) -> bool:
        """Whether a copy is between device and registered memory, within one piece of each. Others fail or are slow."""
        memory = self._device.memory
        ends = [(memory.is_on_device(end, size), memory.is_registered(end, size)) for end in (target, source)]
        return sorted(ends) == [(False, True), (True, False)]


class Cupy:
    """Stands for the part of CuPy that `KernelCopies` uses. Kernels run on CuPy's current stream, not on torch's."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._current = threading.local()
        self.cuda = SimpleNamespace(Device=self._on_device, ExternalStream=self._on_stream)

    def RawKernel(self, source: str, name: str) -> "Kernel":
        return Kernel(self, self._device, source, name)

    @property
    def current_stream(self) -> int:
        return getattr(self._current, "handle", 0)

    @contextmanager
    def _on_device(self, index: int) -> Iterator[None]:
        yield

    @contextmanager
    def _on_stream(self, handle: int) -> Iterator[None]:
        before, self._current.handle = self.current_stream, handle
        try:
            yield
        finally:
            self._current.handle = before


class Kernel:
    """Runs `copy_blocks`, the product's own source, on the host, after a check of every address it was given."""

    def __init__(self, cupy: Cupy, device: FakeDevice, source: str, name: str) -> None:
        self._cupy = cupy
        self._device = device
        self._run = HostKernel(source, name)

    def __call__(self, grid: tuple[int, int], block: tuple[int], arguments: Sequence[int]) -> None:
        tables, num_words = [int(each) for each in arguments[:2]], int(arguments[2])
        sources, targets = (self._spans(table, grid[0], num_words * _WORD_BYTES) for table in tables)
        in_tables = tuple((table, table + 8 * grid[0]) for table in tables)
        self._device.enqueue(
            self._device.stream(self._cupy.current_stream),
            "a copy kernel",
            lambda: self._run(grid, block[0], [*tables, num_words]),
            reads=(*sources, *in_tables),
            writes=targets,
            seconds=grid[0] * num_words * _WORD_BYTES / BUS_BYTES_PER_S,
        )

    def _spans(self, table: int, num_rows: int, num_bytes: int) -> Spans:
        addresses = struct.unpack(f"<{num_rows}q", self._device.memory.upload_at(table, 8 * num_rows))
        memory = self._device.memory
        for address in addresses:
            if not memory.is_on_device(address, num_bytes) and not memory.is_registered(address, num_bytes):
                raise self._device.note_misuse(f"a kernel touches {num_bytes} bytes at {address:#x}: illegal access")
        return tuple((address, address + num_bytes) for address in addresses)
