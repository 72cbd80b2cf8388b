"""Scratch: memory that the passes of one step write to in turn."""

from math import prod

import torch


class Scratch:
    """One tensor of each type, made when it is first asked for, and given out as often as it is asked for: what a
    tensor had is gone when its type is asked for again.

    Memory never touched before is much slower than reused memory (DESIGN.md, section 10): without this, passes over
    logits took up to 1.5 times as long.
    """

    def __init__(self, num_elements: int, device: torch.device) -> None:
        """Tensors have up to *num_elements*."""
        self._num_elements = num_elements
        self._device = device
        self._made: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The tensor of that type in that *shape*, with anything in it."""
        if dtype not in self._made:
            self._made[dtype] = torch.empty(self._num_elements, dtype=dtype, device=self._device)
        return self._made[dtype][: prod(shape)].view(shape)

    def copy(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor of that type with *values* in it."""
        return self.tensor(values.shape, dtype).copy_(values)
