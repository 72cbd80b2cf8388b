"""What a tensor is, in 16 bytes."""

from typing import Any

import torch
import xxhash


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """xxh3_128 of the bytes of a plain dense tensor in row-major order; not of its shape and type."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    raw: Any = plain.flatten().view(torch.uint8).numpy()  # numpy's own buffer type
    return xxhash.xxh3_128_digest(raw)
