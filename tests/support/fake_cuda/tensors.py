"""DeviceTensor: a tensor on the fake device, whose operations are enqueued in the thread's current stream."""

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fake_cuda.device import FakeDevice
from fake_cuda.memory import read
from fake_cuda.spans import Spans
from fake_cuda.streams import CurrentStreams

CUDA = torch.device("cuda", 0)
BUS_BYTES_PER_S = 25e9
_VIEWS = {torch.Tensor.__getitem__, torch.Tensor.view, torch.Tensor.flatten, torch.Tensor.reshape}
_FACTS = {
    torch.Tensor.data_ptr, torch.Tensor.numel, torch.Tensor.element_size, torch.Tensor.size, torch.Tensor.dim,
    torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.__len__,
}  # fmt: skip
_FACT_NAMES = {"shape", "dtype", "ndim", "itemsize", "nbytes", "layout"}
# Functions that bring their tensors to the host first, each with a wait.
_READS = {
    torch.Tensor.unique, torch.Tensor.eq, torch.Tensor.__eq__, torch.Tensor.all, torch.Tensor.any, torch.Tensor.tolist,
    torch.Tensor.item, torch.Tensor.__bool__, torch.equal, torch.Tensor.__repr__,
}  # fmt: skip


class DeviceTensor(torch.Tensor):
    """Looks like a CUDA tensor. Operations that the fake does not know raise NotImplementedError.

    `place` is where its operations run; views share it.
    """

    place: "Place"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        place = next(each.place for each in (*args, *kwargs.values()) if isinstance(each, DeviceTensor))
        with torch._C.DisableTorchFunctionSubclass():
            if func in _VIEWS:
                _refuse_gathering(func, args)
                return place.tensor(func(*args, **kwargs))
            owner = getattr(func, "__self__", None)
            if func in _FACTS or (func.__name__ == "__get__" and getattr(owner, "__name__", "") in _FACT_NAMES):
                return func(*args, **kwargs)
            if func in _READS:
                return func(*[place.to_host(each) for each in args], **kwargs)
            if func in place.operations:
                return place.operations[func](*args, **kwargs)
        raise NotImplementedError(f"the fake device has no {getattr(func, '__qualname__', func)}")


class Place:
    """Makes device tensors, and enqueues the operations on them."""

    def __init__(self, device: FakeDevice, streams: CurrentStreams) -> None:
        self._device = device
        self._streams = streams
        self.operations: dict[Any, Callable[..., Any]] = {
            torch.Tensor.copy_: self._copy,
            torch.Tensor.fill_: self._fill,
            torch.Tensor.zero_: lambda target: self._fill(target, 0),
            torch.Tensor.clone: self._clone,
            torch.Tensor.cpu: self.to_host,
            torch.Tensor.index_copy_: self._index_copy,
            torch.index_select: self._index_select,
            torch.zeros_like: lambda like: self._fill(self.empty(like.shape, like.dtype), 0),
        }

    def tensor(self, plain: torch.Tensor) -> DeviceTensor:
        """The same memory as a device tensor."""
        tensor = plain.as_subclass(DeviceTensor)
        tensor.place = self
        return tensor

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> DeviceTensor:
        return self.tensor(_shaped(self._device.memory.allocate(_num_bytes(shape, dtype)), shape, dtype))

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return _shaped(self._device.memory.allocate_pinned(_num_bytes(shape, dtype)), shape, dtype)

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype) -> DeviceTensor:
        return self._fill(self.empty(shape, dtype), value)

    def to_device(self, source: torch.Tensor, non_blocking: bool) -> DeviceTensor:
        """A copy of an ordinary tensor in fresh device memory."""
        target = self.empty(source.shape, source.dtype)
        self._copy(target, source.contiguous(), non_blocking)
        address, num_bytes = source.data_ptr(), _num_bytes(source.shape, source.dtype)
        if self._device.memory.is_pageable(address, num_bytes):
            self._device.memory.remember_upload(target.data_ptr(), read(address, num_bytes))
        return target

    def to_host(self, source: Any) -> Any:
        """A device tensor's content, after a wait for it; anything else as it is."""
        if not isinstance(source, DeviceTensor):
            return source
        target = torch.empty(source.shape, dtype=source.dtype)
        self._copy(target, source, False)
        return target

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise NotImplementedError("the fake device copies between equal shapes and dtypes")
        (targets, num_bytes), (sources, _) = _spans(target), _spans(source)
        source_address, target_address = source.data_ptr(), target.data_ptr()
        is_up, is_down = not isinstance(source, DeviceTensor), not isinstance(target, DeviceTensor)
        what, seconds = "a copy on the device", num_bytes / (40 * BUS_BYTES_PER_S)
        if is_up or is_down:
            what, seconds = ("a copy up", "a copy down")[is_down], num_bytes / BUS_BYTES_PER_S
        run = functools.partial(_move, target_address, source_address, num_bytes, (target, source))
        is_pageable = (is_up or is_down) and self._is_pageable(source if is_up else target)
        if is_up and is_pageable:  # CUDA takes the bytes before the call returns
            content = read(source_address, num_bytes)
            run, sources = functools.partial(_move, target_address, content, num_bytes, (target,)), ()
        operation = self._device.enqueue(
            self._streams.current.state, what, run, reads=sources, writes=targets, seconds=seconds
        )
        if not non_blocking or (is_down and is_pageable):  # which returns when the bytes are there
            self._device.wait(operation)
        return target

    def _is_pageable(self, host: torch.Tensor) -> bool:
        address, num_bytes = host.data_ptr(), _num_bytes(host.shape, host.dtype)
        # In this order: another thread may register the memory between the two looks, and either answer is right then.
        if self._device.memory.is_pageable(address, num_bytes):
            return True
        if self._device.memory.is_registered(address, num_bytes):
            return False
        raise self._device.note_misuse(f"a copy of {num_bytes} bytes goes over the end of a registration")

    def _fill(self, target: DeviceTensor, value: float) -> DeviceTensor:
        self._kernel("a fill", lambda: _plain(target).fill_(value), writes=_spans(target)[0])
        return target

    def _clone(self, source: DeviceTensor) -> DeviceTensor:
        return self._copy(self.empty(source.shape, source.dtype), source, True)  # type: ignore[return-value]

    def _index_select(self, source: DeviceTensor, dim: int, index: DeviceTensor, *, out: DeviceTensor) -> DeviceTensor:
        rows = self._rows(source, dim, index)
        reads = (*_spans(index)[0], *rows)
        self._kernel(
            "a gather",
            lambda: torch.index_select(_plain(source), 0, _plain(index), out=_plain(out)),
            reads=reads,
            writes=_spans(out)[0],
        )
        return out

    def _index_copy(self, target: DeviceTensor, dim: int, index: DeviceTensor, source: DeviceTensor) -> DeviceTensor:
        rows = self._rows(target, dim, index)
        reads = (*_spans(index)[0], *_spans(source)[0])
        self._kernel(
            "a scatter", lambda: _plain(target).index_copy_(0, _plain(index), _plain(source)), reads=reads, writes=rows
        )
        return target

    def _rows(self, blocks: DeviceTensor, dim: int, index: DeviceTensor) -> Spans:
        """The addresses of the rows. CudaMisuse for a row that does not exist, where a device would end the context."""
        if dim != 0 or index.dtype != torch.int64:
            raise NotImplementedError("the fake device gathers rows by int64")
        content = self._device.memory.upload_at(index.data_ptr(), index.numel() * 8)
        rows = torch.frombuffer(bytearray(content), dtype=torch.int64).tolist() if content else []
        if any(not 0 <= row < len(blocks) for row in rows):
            raise self._device.note_misuse(f"rows {min(rows)} to {max(rows)} of {len(blocks)}")
        (((start, _),), num_bytes) = _spans(blocks)
        row_bytes = num_bytes // len(blocks)
        return tuple((start + row * row_bytes, start + (row + 1) * row_bytes) for row in rows)

    def _kernel(self, what: str, run: Callable[[], object], reads: Spans = (), writes: Spans = ()) -> None:
        self._device.enqueue(self._streams.current.state, what, run, reads=reads, writes=writes)


def _move(target: int, source: int | bytes, num_bytes: int, kept: object) -> None:
    """Copy bytes. *kept* has the tensors whose memory these are, so that it is there until the copy has run."""
    ctypes.memmove(target, source, num_bytes)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _shaped(memory: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return memory.view(dtype).view(tuple(shape))


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _spans(tensor: torch.Tensor) -> tuple[Spans, int]:
    """The tensor's addresses, and its number of bytes."""
    with torch._C.DisableTorchFunctionSubclass():
        if not tensor.is_contiguous():
            raise NotImplementedError("the fake device touches contiguous tensors only")
        num_bytes = tensor.numel() * tensor.element_size()
        return ((tensor.data_ptr(), tensor.data_ptr() + num_bytes),), num_bytes


def _refuse_gathering(func: Any, args: Sequence[Any]) -> None:
    if func is torch.Tensor.__getitem__:
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not all(key is None or key is Ellipsis or isinstance(key, int | slice) for key in keys):
            raise NotImplementedError("the fake device has views, and no gathering, by index")
