"""The digest of a tensor's bytes: 32 bytes, for which no second tensor can be found."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

PIECE_BYTES = 4 << 20  # hashed at a time: one thread has 0.4 GB/s without SHA instructions, so all cores take part


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """sha256 over the sha256 of each piece of a plain dense tensor's bytes, row-major; not of its shape and type."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    numbers: Any = plain.flatten().view(torch.uint8).numpy()  # numpy's own buffer type
    raw = memoryview(numbers)
    pieces = [raw[start : start + PIECE_BYTES] for start in range(0, len(raw), PIECE_BYTES)]
    if len(pieces) > 1:
        with ThreadPoolExecutor(thread_name_prefix="kvtier-digest") as threads:
            return hashlib.sha256(b"".join(threads.map(_digest, pieces))).digest()
    return hashlib.sha256(b"".join(map(_digest, pieces))).digest()


def _digest(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()
