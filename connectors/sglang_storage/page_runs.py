"""The parts of the storage backend that need none of SGLang's classes: its callers' threads, and a page's memory."""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch

from kvtier.connectors.staged_disk import Rows


class StorageThreads:
    """The threads that call a storage, which are watched to detect resets of SGLang's cache.

    SGLang resets its cache after a weight update, and does not notify the storage. Only a reset makes SGLang end the
    threads that call the storage and start new ones. So a thread that has ended means that there was a reset.
    """

    def __init__(self) -> None:
        """Create an empty record of threads."""
        self._lock = threading.Lock()
        self._seen: set[threading.Thread] = set()

    def any_ended(self) -> bool:
        """Record the calling thread. Return whether an earlier caller's thread has ended since the last call."""
        with self._lock:
            ended = {thread for thread in self._seen if not thread.is_alive()}
            self._seen = (self._seen - ended) | {threading.current_thread()}
            return bool(ended)


class PageRuns:
    """The contiguous runs of the pool's memory that make up each page.

    A run has the keys or values of all layers, or of one layer, depending on the pool's layout. A row on disk has the
    runs of a page one after the other. The memory belongs to the pool, and the caller must make sure that the pool
    does not reuse a page while it is copied.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        _, self.sizes = self._runs(torch.arange(pool.page_size, dtype=torch.int64))

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a page."""
        return sum(self.sizes)

    def addresses(self, host_indices: torch.Tensor) -> list[list[int]]:
        """Return the addresses of each page's runs.

        *host_indices* are SGLang's indices in the pool of all tokens of one or more whole pages.
        """
        pointers, _ = self._runs(host_indices)
        step = len(self.sizes)
        return [list(pointers[start : start + step]) for start in range(0, len(pointers), step)]

    def write(self, rows: Rows, pages: Sequence[Sequence[int]]) -> None:
        """Copy the pages at these addresses into *rows*."""
        for row, page in zip(rows, pages, strict=True):
            place = row.ctypes.data
            for address, size in zip(page, self.sizes, strict=True):
                ctypes.memmove(place, address, size)
                place += size

    def read(self, rows: Rows, pages: Sequence[Sequence[int]]) -> None:
        """Copy *rows* into the pages at these addresses."""
        for row, page in zip(rows, pages, strict=True):
            place = row.ctypes.data
            for address, size in zip(page, self.sizes, strict=True):
                ctypes.memmove(address, place, size)
                place += size

    def _runs(self, host_indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pointers, sizes = self._pool.get_page_buffer_meta(host_indices)
        num_pages = len(host_indices) // self._pool.page_size
        return pointers, list(sizes[: len(sizes) // max(1, num_pages)])
