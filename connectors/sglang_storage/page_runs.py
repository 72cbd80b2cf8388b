"""PageRuns: where the pages of a host pool lie, and their bytes in rows."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from kvtier.connectors.staged_disk import Rows


class PageRuns:
    """A page is a few runs of the pool's memory: keys and values of all layers, or of each, as the pool's layout has
    it. A row has them one after the other. The memory is the pool's; who copies sees to it that the page is leased."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        _, self.sizes = self._runs(torch.arange(pool.page_size, dtype=torch.int64))

    @property
    def row_bytes(self) -> int:
        """Bytes of a page."""
        return sum(self.sizes)

    def addresses(self, host_indices: torch.Tensor) -> list[list[int]]:
        """Of the runs of each page. *host_indices*: of all tokens of whole pages, as SGLang has them."""
        pointers, _ = self._runs(host_indices)
        step = len(self.sizes)
        return [list(pointers[start : start + step]) for start in range(0, len(pointers), step)]

    def write(self, rows: Rows, pages: Sequence[Sequence[int]]) -> None:
        """Copy the pages at these addresses into rows."""
        for row, page in zip(rows, pages, strict=True):
            place = row.ctypes.data
            for address, size in zip(page, self.sizes, strict=True):
                ctypes.memmove(place, address, size)
                place += size

    def read(self, rows: Rows, pages: Sequence[Sequence[int]]) -> None:
        """Copy rows into the pages at these addresses."""
        for row, page in zip(rows, pages, strict=True):
            place = row.ctypes.data
            for address, size in zip(page, self.sizes, strict=True):
                ctypes.memmove(address, place, size)
                place += size

    def _runs(self, host_indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pointers, sizes = self._pool.get_page_buffer_meta(host_indices)
        num_pages = len(host_indices) // self._pool.page_size
        return pointers, list(sizes[: len(sizes) // max(1, num_pages)])
