"""RowCache: the encoder's results in host memory, by image, the least recently used evicted first."""

import threading
from collections import OrderedDict

import torch


class RowCache:
    """Rows of images by key, at most *capacity_bytes*. Any thread may use it.

    Rows that alone exceed the capacity are not kept.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()  # guards the next two
        self._rows: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # least recently used first
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows in the cache."""
        return self._num_bytes

    def get(self, key: bytes) -> torch.Tensor | None:
        """Return the rows under *key*, which become the most recently used; None if there are none."""
        with self._lock:
            if key in self._rows:
                self._rows.move_to_end(key)
            return self._rows.get(key)

    def put(self, key: bytes, rows: torch.Tensor) -> None:
        """Keep *rows*, which must not change, as the most recently used. Evict others to make room."""
        with self._lock:
            if key in self._rows or rows.nbytes > self._capacity_bytes:
                return
            self._rows[key] = rows
            self._num_bytes += rows.nbytes
            while self._num_bytes > self._capacity_bytes:
                _, evicted = self._rows.popitem(last=False)
                self._num_bytes -= evicted.nbytes

    def clear(self) -> None:
        """Evict all rows."""
        with self._lock:
            self._rows.clear()
            self._num_bytes = 0
