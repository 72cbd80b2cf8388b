"""Puts a fake device in the place of torch's CUDA, NVIDIA's bindings and CuPy, and takes it away again."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fake_cuda.device import FakeDevice
from fake_cuda.runtimes import Bindings, Cudart, Cupy
from fake_cuda.schedules import Schedule
from fake_cuda.streams import CurrentStreams, Event, Stream
from fake_cuda.tensors import Place


@contextmanager
def installed(schedule: Schedule) -> Iterator[FakeDevice]:
    """Put a fake device 0 in place for all threads. At the end `CudaMisuse` for any misuse or registration left."""
    device = FakeDevice(schedule)
    with pytest.MonkeyPatch.context() as patch:
        streams = CurrentStreams(device)
        _patch_streams(patch, device, streams)
        _patch_tensors(patch, Place(device, streams))
        for name, module in _modules(device).items():
            patch.setitem(sys.modules, name, module)
        yield device
        device.check()


def _patch_streams(patch: pytest.MonkeyPatch, device: FakeDevice, streams: CurrentStreams) -> None:
    class TorchEvent(Event):
        def __init__(self, enable_timing: bool = False) -> None:
            super().__init__(device, enable_timing)

        def record(self, stream: Stream | None = None) -> None:
            super().record(streams.current if stream is None else stream)

    class TorchStream(Stream):
        def __init__(self, device_id: object = None, priority: int = 0, *, device: object = None) -> None:
            super().__init__(fake, fake.new_stream())

    fake, cudart = device, Cudart(device)
    replacements: dict[str, Any] = {
        "Event": TorchEvent,
        "Stream": TorchStream,
        "stream": streams.using,
        "current_stream": lambda device=None: streams.current,
        "device": lambda device: nullcontext(),
        "synchronize": lambda device=None: fake.wait_all(),
        "cudart": lambda: cudart,
        "get_device_properties": lambda device: SimpleNamespace(
            pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0, total_memory=16 << 30
        ),
        "_sleep": lambda cycles: fake.hold(streams.current.state, cycles),
    }
    for name, replacement in replacements.items():
        patch.setattr(torch.cuda, name, replacement)


def _patch_tensors(patch: pytest.MonkeyPatch, place: Place) -> None:
    """Replace what makes device tensors and pinned memory; for other tensors torch's own functions go on."""
    own = {name: getattr(torch, name) for name in ("empty", "zeros", "full")}
    own_to = torch.Tensor.to

    def make(name: str, value: float | None) -> Any:
        def make_tensor(*size: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
            is_on_device = device is not None and torch.device(device).type == "cuda"
            is_pinned = options.pop("pin_memory", False)
            if not is_on_device and not is_pinned:
                return own[name](*size, dtype=dtype, device=device, **options)
            *shape, fill = size if name == "full" else (*size, value)
            shape = shape[0] if not isinstance(shape[0], int) else shape
            dtype = torch.get_default_dtype() if dtype is None else dtype
            if is_on_device:
                return place.empty(shape, dtype) if fill is None else place.full(shape, fill, dtype)
            pinned = place.empty_pinned(shape, dtype)
            return pinned if fill is None else pinned.fill_(fill)

        return make_tensor

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        target = args[0] if args else options.get("device")
        if isinstance(target, torch.device) and target.type == "cuda":
            return place.to_device(tensor, options.get("non_blocking", False))
        return own_to(tensor, *args, **options)

    for name, value in {"empty": None, "zeros": 0, "full": None}.items():
        patch.setattr(torch, name, make(name, value))
    patch.setattr(torch.Tensor, "to", to)


def _modules(device: FakeDevice) -> dict[str, Any]:
    return {
        "cuda": ModuleType("cuda"),
        "cuda.bindings": ModuleType("cuda.bindings"),
        "cuda.bindings.runtime": Bindings(device),
        "cupy": Cupy(device),
    }
