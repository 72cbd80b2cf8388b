"""DeviceSlab: the device memory for the KV blocks of one attention group, with each block contiguous."""

import torch


class DeviceSlab:
    """The device memory for the KV blocks of one attention group. Each slot holds one block.

    The shape of `tensor` is [num_slots, num_layers, 2, block_size, num_kv_heads, head_dim]. The dimension of size 2 has
    the keys first, then the values. Whoever leases a slot owns its bytes; the slab does not track leases.
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
        """The memory of `tensor` as bytes, [num_slots, block_bytes]."""
        return self.tensor.view(self.tensor.shape[0], -1).view(torch.uint8)
