"""DeviceSlab: the device's block slots of one attention group, block-major, so that a block is one contiguous run."""

import torch


class DeviceSlab:
    """One tensor, [num_slots, num_layers, 2, block_size, num_kv_heads, head_dim]; index 2 is keys, then values.

    On a CPU this is ordinary memory. A slot's bytes belong to the lease's owner.
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
        # Written once here: memory never touched before would slow the first blocks down (DESIGN.md section 10).
        self.tensor = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.num_layers = num_layers
        self.block_bytes = self.tensor[0].numel() * self.tensor.element_size()

    @property
    def blocks(self) -> torch.Tensor:
        """The same memory as bytes, [num_slots, block_bytes]."""
        return self.tensor.view(self.tensor.shape[0], -1).view(torch.uint8)
