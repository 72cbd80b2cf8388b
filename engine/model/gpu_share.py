"""Size of the device's KV pool when `gpu_memory_utilization` is configured instead of a capacity."""

from dataclasses import dataclass
from typing import Self

import torch
from transformers import PreTrainedModel

from kvtier.engine.config import Config, size_text
from kvtier.engine.model.paged_layout import PagedLayout

# GPU memory used by a process before its first tensor, and by libraries: CUDA's context and kernels take 300 to
# 500 MiB, cuBLAS workspaces about 40 MiB.
LIBRARY_BYTES = 600 << 20
# Vectors per token that a step holds in memory at once. HIDDEN_ROWS have the hidden size: the residual, its norm,
# queries, keys, values, attention output and copies. MLP_ROWS have the MLP's size: gate, up and their product.
HIDDEN_ROWS, MLP_ROWS = 8, 3
LOGIT_COPIES = 3  # of each request's logits: the model's output, the changed logits and the sorted logits
_LOGIT_BYTES = 4
STATE_COPIES = 3  # of each request's states in one layer: copies of the slots, the new states, and what is written back


@dataclass(frozen=True, slots=True)
class GpuShare:
    """The division of a GPU's memory into weights, activations of the largest step, and KV blocks.

    The engine may use the fraction *share* of *total_bytes*, as with vLLM's `gpu_memory_utilization`. vLLM measures the
    activations; *step_bytes* is an estimate from the sizes of the model.
    """

    total_bytes: int
    share: float
    weight_bytes: int
    step_bytes: int

    @classmethod
    def of(cls, config: Config, model: PreTrainedModel, layout: PagedLayout, device: torch.device) -> Self:
        """Divide a GPU's memory among *model*, its steps and KV. Raise ValueError for a CPU.

        Weights have the dtype of *layout*. The model itself may be on the meta device, without weights.
        """
        share = config.device.gpu_memory_utilization
        assert share is not None, "gpu_memory_utilization is not set"
        if device.type != "cuda":
            raise config.device.no_gpu()
        tensors = [*model.parameters(), *model.buffers()]
        return cls(
            torch.cuda.get_device_properties(device).total_memory,
            share,
            sum(tensor.numel() for tensor in tensors) * layout.dtype.itemsize,
            _step_bytes(config, model, layout),
        )

    @property
    def pool_bytes(self) -> int:
        """Bytes left for KV. Raises ValueError if there are none."""
        left = int(self.total_bytes * self.share) - self.weight_bytes - self.step_bytes
        if left <= 0:
            allowed, needed = size_text(self.total_bytes * self.share), size_text(self.weight_bytes + self.step_bytes)
            raise ValueError(
                f"gpu_memory_utilization {self.share:g}: this allows {allowed}, but weights and a step need {needed}; "
                "raise gpu_memory_utilization"
            )
        return left

    def __str__(self) -> str:
        return (
            f"{self.share:g} of {size_text(self.total_bytes)}, less weights {size_text(self.weight_bytes)} and steps "
            f"{size_text(self.step_bytes)}"
        )


def device_capacity(config: Config, model: PreTrainedModel, layout: PagedLayout) -> int:
    """Return the bytes for KV blocks on the model's device, as configured or left by `gpu_memory_utilization`."""
    if config.device.gpu_memory_utilization is None:
        return config.device.capacity
    return GpuShare.of(config, model, layout, model.device).pool_bytes


def _step_bytes(config: Config, model: PreTrainedModel, layout: PagedLayout) -> int:
    sizes, scheduler = model.config.get_text_config(), config.scheduler
    hidden: int = sizes.hidden_size
    token_bytes: int = (
        HIDDEN_ROWS * hidden + MLP_ROWS * getattr(sizes, "intermediate_size", 4 * hidden)
    ) * layout.dtype.itemsize
    request_bytes: int = LOGIT_COPIES * sizes.vocab_size * _LOGIT_BYTES + STATE_COPIES * layout.states.layer_bytes
    return LIBRARY_BYTES + scheduler.token_budget * token_bytes + scheduler.max_running * request_bytes
