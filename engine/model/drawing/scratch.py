"""Scratch: reused memory for the passes of one step."""

from math import prod

import torch


class Scratch:
    """One reusable tensor of each dtype, allocated on first use. The next request for a dtype overwrites its content.

    Memory never touched before is much slower than reused memory (DESIGN.md, section 10): with new memory, passes over
    logits took up to 1.5 times as long.
    """

    def __init__(self, num_elements: int, device: torch.device) -> None:
        """Create an empty scratch for tensors of up to *num_elements*."""
        self._num_elements = num_elements
        self._device = device
        self._made: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor of *dtype* in this *shape*, with undefined content."""
        if dtype not in self._made:
            self._made[dtype] = torch.empty(self._num_elements, dtype=dtype, device=self._device)
        return self._made[dtype][: prod(shape)].view(shape)

    def copy(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor of *dtype* with a copy of *values*."""
        return self.tensor(values.shape, dtype).copy_(values)
