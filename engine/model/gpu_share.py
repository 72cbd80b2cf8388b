"""How many bytes of KV a GPU holds when a part of its memory is given in place of a size."""

from dataclasses import dataclass
from typing import Self

import torch
from transformers import PreTrainedModel

from kvtier.engine.config import Config, size_text

# What a process has on a GPU before its first tensor, and what libraries take for themselves: CUDA's context and
# kernels 300 to 500 MiB, cuBLAS's workspaces 40 MiB or so.
LIBRARY_BYTES = 600 << 20
# Of a step's tokens are in memory at once: the residual, its norm, queries, keys, values, what attention gives, and
# copies of rows; and of the MLP gate, up and their product.
HIDDEN_ROWS, MLP_ROWS = 8, 3
LOGIT_COPIES = 3  # of each row that is drawn from: as the model gives it, changed, sorted
_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class GpuShare:
    """What becomes of *share* of a GPU's *total_bytes*, as with vLLM's option of that name: weights, what the largest
    step needs beside them, and KV. The step's part is reckoned from the model's sizes, not measured."""

    total_bytes: int
    share: float
    weight_bytes: int
    step_bytes: int

    @classmethod
    def of(cls, config: Config, model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> Self:
        """That of a *model*, which may be without its weights, in *dtype*. ValueError if *device* is no GPU."""
        share = config.device.gpu_memory_utilization
        assert share is not None, "a size is given"
        if device.type != "cuda":
            raise config.device.no_gpu()
        tensors = [*model.parameters(), *model.buffers()]
        return cls(
            torch.cuda.get_device_properties(device).total_memory,
            share,
            sum(tensor.numel() for tensor in tensors) * dtype.itemsize,
            _step_bytes(config, model, dtype),
        )

    @property
    def pool_bytes(self) -> int:
        """What is left for KV. ValueError if that is nothing."""
        left = int(self.total_bytes * self.share) - self.weight_bytes - self.step_bytes
        if left <= 0:
            allowed, needed = size_text(self.total_bytes * self.share), size_text(self.weight_bytes + self.step_bytes)
            raise ValueError(
                f"gpu_memory_utilization {self.share:g}: that is {allowed}; weights and a step need {needed}; raise it"
            )
        return left

    def __str__(self) -> str:
        return (
            f"{self.share:g} of {size_text(self.total_bytes)}, less weights {size_text(self.weight_bytes)} and steps "
            f"{size_text(self.step_bytes)}"
        )


def device_capacity(config: Config, model: PreTrainedModel) -> int:
    """Bytes of KV that the model's device gets: the configured size, or what `GpuShare` comes to."""
    if config.device.gpu_memory_utilization is None:
        return config.device.capacity
    return GpuShare.of(config, model, model.dtype, model.device).pool_bytes


def _step_bytes(config: Config, model: PreTrainedModel, dtype: torch.dtype) -> int:
    sizes, scheduler = model.config.get_text_config(), config.scheduler
    hidden: int = sizes.hidden_size
    token_bytes: int = (
        HIDDEN_ROWS * hidden + MLP_ROWS * getattr(sizes, "intermediate_size", 4 * hidden)
    ) * dtype.itemsize
    logit_bytes: int = LOGIT_COPIES * sizes.vocab_size * _LOGIT_BYTES
    return LIBRARY_BYTES + scheduler.token_budget * token_bytes + scheduler.max_running * logit_bytes
