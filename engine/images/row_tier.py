"""RowTier: the tier below the engine's memory in which the image encoder's results are kept."""

from typing import Protocol

import torch


class RowTier(Protocol):
    """A tier for the rows that the encoder computed for images. A lost row costs another run of the encoder.

    `read` blocks and may be called in any thread, but not in the engine's or on an event loop. All other methods are
    for the engine's thread.
    """

    def read(self, key: bytes, shape: tuple[int, int, int], dtype: torch.dtype, tenant: bytes) -> torch.Tensor | None:
        """Return the rows under *key*, which have this *shape* and *dtype*; None if they are missing or damaged.

        They count for *tenant* if reading them moves them to a warmer tier.
        """

    def write(self, key: bytes, rows: torch.Tensor, tenant: bytes) -> None:
        """Queue *rows* to be written, unless they are too large or too many wait. They count for *tenant*."""

    def clear(self) -> None:
        """Delete the rows of this model's images in the background. Until they are deleted, `read` finds none."""

    def flush(self) -> None:
        """Wait until what is queued is done, at most a few seconds."""

    def close(self) -> None:
        """Stop all threads and sessions that this object has started. Queued rows may be lost."""
