"""DeviceSlab: the device slots of one attention group in block-major layout, so that each block is contiguous."""

import torch


class DeviceSlab:
    """One tensor, [num_slots, num_layers, 2, block_size, num_kv_heads, head_dim]; index 2 is keys, then values.

    A slot holds one block, and its bytes belong to the owner of its lease. On a CPU the tensor is ordinary memory.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_slots, num_layers, 2, block_size, num_kv_heads, head_dim)
        # Zeroed so that all pages are touched: the first use of untouched memory is slow (DESIGN.md section 10).
        self.tensor = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.num_layers = num_layers
        self.block_bytes = self.tensor[0].numel() * self.tensor.element_size()

    @property
    def blocks(self) -> torch.Tensor:
        """The same memory as bytes, [num_slots, block_bytes]."""
        return self.tensor.view(self.tensor.shape[0], -1).view(torch.uint8)
