"""DeviceSlab: the device memory for the KV blocks of one attention group, with each block contiguous."""

from collections.abc import Sequence

import torch


class DeviceSlab:
    """The device memory for the KV blocks of one attention group. Each slot holds one block.

    What a layer keeps of a token has one or more *parts* of [heads, width] numbers: keys and values, or one latent row.
    A block has for each layer the first part of all its tokens, then the second. Whoever leases a slot owns its bytes;
    the slab does not track leases.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        block_size: int,
        parts: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the memory. *parts* has the number of heads and the width of each part."""
        sizes = [block_size * heads * width for heads, width in parts]
        # Zeroed so that all pages are touched: the first use of untouched memory is slow (DESIGN.md section 10).
        self._memory = torch.empty((num_slots, num_layers, sum(sizes)), dtype=dtype, device=device).zero_()
        self.parts = [  # each [num_slots, num_layers, block_size, heads, width]
            memory.view(num_slots, num_layers, block_size, heads, width)
            for memory, (heads, width) in zip(torch.split(self._memory, sizes, dim=2), parts, strict=True)
        ]
        self.num_layers = num_layers
        self.block_bytes = self._memory[0].numel() * self._memory.element_size()
        self._shape = (num_slots, num_layers, len(parts), block_size, *parts[0])
        self.is_pair = len(parts) == 2 and parts[0] == parts[1]  # keys and values of equal shapes

    @property
    def tensor(self) -> torch.Tensor:
        """The memory of a pair, [num_slots, num_layers, 2, block_size, heads, width]: keys first, then values."""
        assert self.is_pair, "keys and values have different shapes"
        return self._memory.view(self._shape)

    @property
    def blocks(self) -> torch.Tensor:
        """The memory as bytes, [num_slots, block_bytes]."""
        return self._memory.view(self._memory.shape[0], -1).view(torch.uint8)
