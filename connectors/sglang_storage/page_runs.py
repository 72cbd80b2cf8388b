"""`StorageThreads` and `PageRuns`: which threads call the storage backend, and where pages lie in SGLang's memory."""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch

from kvtier.connectors.staged_disk import Rows


class StorageThreads:
    """A detector of resets of SGLang's cache, which watches the threads that call the storage backend.

    SGLang resets its cache after a weight update, and does not notify the backend. During a reset, and only then, it
    ends the threads that call the backend and starts new ones. So if one of these threads has ended, there was a reset.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[threading.Thread] = set()

    def any_ended(self) -> bool:
        """Record the calling thread. Return whether a recorded thread has ended since the previous call."""
        with self._lock:
            ended = {thread for thread in self._seen if not thread.is_alive()}
            self._seen = (self._seen - ended) | {threading.current_thread()}
            return bool(ended)


class PageRuns:
    """A copier of pages between SGLang's host pool and rows. A row is a buffer for one page on its way to or from disk.

    A page consists of several contiguous runs of bytes in the pool. A run has the keys or the values of one layer or of
    all layers, depending on the pool's layout, or one kind of states of all layers. A row has the runs of a page one
    after the other. The caller must make sure that the pool does not reuse a page while it is copied.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_size: int = pool.page_size  # tokens; 1 for a pool whose pages are states after one token
        _, self.sizes = self._runs(torch.arange(self.page_size, dtype=torch.int64))

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a page."""
        return sum(self.sizes)

    def addresses(self, host_indices: torch.Tensor) -> list[list[int]]:
        """Return for each page the addresses of its runs, the contiguous byte ranges of the page in SGLang's pool.

        *host_indices* has the indices in the pool of all tokens of the pages.
        """
        pointers, _ = self._runs(host_indices)
        step = len(self.sizes)
        return [list(pointers[start : start + step]) for start in range(0, len(pointers), step)]

    def write(self, rows: Rows, pages: Sequence[Sequence[int]]) -> None:
        """Copy pages from SGLang's pool into *rows*. *pages* has the addresses that `addresses` returned."""
        for row, page in zip(rows, pages, strict=True):
            place = row.ctypes.data
            for address, size in zip(page, self.sizes, strict=True):
                ctypes.memmove(place, address, size)
                place += size

    def read(self, rows: Rows, pages: Sequence[Sequence[int]]) -> None:
        """Copy *rows* into pages of SGLang's pool. *pages* has the addresses that `addresses` returned."""
        for row, page in zip(rows, pages, strict=True):
            place = row.ctypes.data
            for address, size in zip(page, self.sizes, strict=True):
                ctypes.memmove(address, place, size)
                place += size

    def _runs(self, host_indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pointers, sizes = self._pool.get_page_buffer_meta(host_indices)
        num_pages = len(host_indices) // self.page_size
        return pointers, list(sizes[: len(sizes) // max(1, num_pages)])
