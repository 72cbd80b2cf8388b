"""A model's linear layers on a CPU, computed by oneDNN from copies of their weights in its own order.

A product of 32 rows takes two thirds of the time of torch's own, which packs the weights anew in every call, one of 512
rows nine tenths (bench/engine/decoding.py). The sums are the same but for their order.
"""

from pathlib import Path
from typing import TypeGuard

import torch
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel

from kvtier.engine.model.cpu.stand_ins import Place, StandIn, forward_of
from kvtier.engine.model.fast_path import TOLERANCE, share_of_largest, works

DTYPES = (torch.float32, torch.bfloat16)
NUM_ROWS = 32  # that the order is chosen for; it is as good for one row and for thousands
SHARE = 8  # of the memory that is available the copies may take so much: one part in eight


class PackedLinear(StandIn):
    """Stands in for the `forward` of one linear layer."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), NUM_ROWS)
        self._bias = None if layer.bias is None else layer.bias.detach()

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """The layer's output for *input*, [..., in_features]."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            input.contiguous(), self._weight, self._bias, "none", [], ""
        )
        return output


def packed_linears(model: PreTrainedModel, available_bytes: int) -> list[Place]:
    """Return the layers of a model that can be packed.

    The list is empty without room for the copies, on another device, and if this torch has no oneDNN: the model then
    runs as transformers has it. A layer whose packed form fails or differs on this processor is left out. oneDNN packs
    bfloat16 only with AVX-512 or AVX-NE-CONVERT, for example.
    """
    layers = [layer for layer in model.modules() if _can_be_packed(layer)] if _has_onednn() else []
    if sum(layer.weight.nbytes for layer in layers) > available_bytes // SHARE:
        return []
    with torch.inference_mode():
        return [forward_of(layer, PackedLinear(layer)) for layer in layers if _works(layer)]


def _works(layer: torch.nn.Linear) -> bool:
    """Return whether a packed layer of this dtype and shape computes what the layer itself does."""
    dtype, has_bias = layer.weight.dtype, layer.bias is not None
    return works(
        "packed linear layers", (dtype, tuple(layer.weight.shape), has_bias), lambda: _error(layer), TOLERANCE[dtype]
    )


def _error(layer: torch.nn.Linear) -> float:
    rows = torch.linspace(-1, 1, 2 * layer.in_features).view(2, -1).to(layer.weight.dtype)
    return share_of_largest(PackedLinear(layer)(rows), torch.nn.functional.linear(rows, layer.weight, layer.bias))


def _has_onednn() -> bool:
    """Whether this torch has the operations, which are its compiler's and no promise of its interface."""
    is_there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # untyped in torch
    return is_there and all(hasattr(torch.ops.mkldnn, it) for it in ("_linear_pointwise", "_reorder_linear_weight"))


def _can_be_packed(layer: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Whether it is a plain linear layer in memory, whose `forward` nobody has replaced."""
    return (
        type(layer) is torch.nn.Linear
        and type(layer.weight) is torch.nn.Parameter
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype in DTYPES
        and layer.weight.numel() > 0
        and "forward" not in vars(layer)
        and not is_parametrized(layer)
    )


def available_bytes() -> int:
    """Memory that can be had without swapping: what the kernel says, or what is left of a container's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    of_machine = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return of_machine
    return of_machine if limit == "max" else min(of_machine, max(0, int(limit) - int(used)))
