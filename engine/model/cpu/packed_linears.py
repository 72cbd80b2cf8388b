"""PackedLinears: a model's linear layers on a CPU, computed by oneDNN from reordered copies of their weights.

torch's own linear layer reorders its weights in every call. Compared with torch, a packed layer takes two thirds of the
time for an input of 32 rows, and nine tenths for 512 rows (bench/engine/decoding.py). Results differ only in the order
of the sums.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

import torch
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel

from kvtier.engine.model.fast_path import TOLERANCE, share_of_largest, works

DTYPES = (torch.float32, torch.bfloat16)
NUM_ROWS = 32  # oneDNN orders the weights for inputs of this many rows; one row or thousands are as fast
MAX_MEMORY_SHARE = 1 / 8  # of the available memory, for all copies of a model


class PackedLinear:
    """A replacement for the `forward` of one linear layer.

    The code that detects changes of the model allows this class, and reports every other replacement.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), NUM_ROWS)
        self._bias = None if layer.bias is None else layer.bias.detach()

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for *input*, [..., in_features]."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            input.contiguous(), self._weight, self._bias, "none", [], ""
        )
        return output


class PackedLinears:
    """The packed copies of a model's linear layers, which make its forward passes on a CPU faster."""

    def __init__(self, model: PreTrainedModel, available_bytes: int) -> None:
        """Pack the layers of *model* that can be packed.

        Pack none if the copies would take more than `MAX_MEMORY_SHARE` of *available_bytes*, if the model is not on a
        CPU, or if torch has no oneDNN. Leave out layers whose packed form fails or gives a wrong result on this
        processor. For example, oneDNN packs bfloat16 only with AVX-512 or AVX-NE-CONVERT.
        """
        layers = [layer for layer in model.modules() if _can_be_packed(layer)] if _has_onednn() else []
        if sum(layer.weight.nbytes for layer in layers) > MAX_MEMORY_SHARE * available_bytes:
            layers = []
        with torch.inference_mode():
            self._packed = [(layer, PackedLinear(layer)) for layer in layers if _works(layer)]

    @property
    def num_layers(self) -> int:
        """Number of packed layers."""
        return len(self._packed)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Use the packed layers in the forward passes that run in the context.

        Another engine that uses the same model may compute with these layers too, or remove them before this context
        ends. Both are harmless, because a layer computes the same with and without packing.
        """
        for layer, packed in self._packed:
            vars(layer)["forward"] = packed
        try:
            yield
        finally:
            for layer, _ in self._packed:
                vars(layer).pop("forward", None)


def available_bytes() -> int:
    """Return the bytes of memory that can be used without swapping, within the container's limit if it has one."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    of_machine = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return of_machine
    return of_machine if limit == "max" else min(of_machine, max(0, int(limit) - int(used)))


def _works(layer: torch.nn.Linear) -> bool:
    """Return whether the packed form of a layer of this dtype and shape gives right results on this machine."""
    dtype, has_bias = layer.weight.dtype, layer.bias is not None
    return works(
        "packed linear layers", (dtype, tuple(layer.weight.shape), has_bias), lambda: _error(layer), TOLERANCE[dtype]
    )


def _error(layer: torch.nn.Linear) -> float:
    rows = torch.linspace(-1, 1, 2 * layer.in_features).view(2, -1).to(layer.weight.dtype)
    return share_of_largest(PackedLinear(layer)(rows), torch.nn.functional.linear(rows, layer.weight, layer.bias))


def _has_onednn() -> bool:
    """Return whether this torch has the oneDNN operations used here.

    The operations belong to torch's compiler and are not a public interface.
    """
    is_there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # untyped in torch
    return is_there and all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))


def _can_be_packed(layer: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Return whether *layer* is a `torch.nn.Linear` with plain weights on the CPU and its original `forward`."""
    return (
        type(layer) is torch.nn.Linear
        and type(layer.weight) is torch.nn.Parameter
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype in DTYPES
        and layer.weight.numel() > 0
        and "forward" not in vars(layer)
        and not is_parametrized(layer)
    )
