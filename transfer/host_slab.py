"""HostSlab: block slots in one anonymous memory file, backed (and pinned, with CUDA) piece by piece."""

import logging
import math
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

# Pins num_bytes of memory at an address; gives the function that undoes it.
Pin = Callable[[int, int], Callable[[], None]]
MADV_POPULATE_WRITE = 23  # <linux/mman.h>; Python's mmap does not name it
MAP_STEP_BYTES = 4 << 20  # the interpreter's lock is held for one step: 2 ms
PIECE_BYTES = 64 << 20  # one registration of >= 512 GiB fails and one of many GiB stalls every CUDA call


class HostSlab:
    """*num_slots* slots of *block_bytes* each in a memory file (`memfd`): nothing is left behind by a killed process.

    The bytes of a slot belong to whoever leases the slot. Memory touched for the first time is 8 to 18 times slower
    than reused memory (measured; DESIGN.md section 10), so a background thread backs the file piece by piece and,
    when *pin* is given, pins each piece; slots that it has not reached yet work, only slower.
    """

    def __init__(self, num_slots: int, block_bytes: int, pin: Pin | None = None) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.num_bytes = num_slots * block_bytes
        self.prepared_bytes = 0
        self._pin = pin
        self._unpins: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._file = os.memfd_create("kvtier-host-slab", os.MFD_CLOEXEC)
        os.ftruncate(self._file, max(self.num_bytes, mmap.PAGESIZE))
        self._map = mmap.mmap(self._file, max(self.num_bytes, mmap.PAGESIZE))
        flat = np.frombuffer(self._map, dtype=np.uint8, count=self.num_bytes)
        self.blocks: npt.NDArray[np.uint8] = flat.reshape(num_slots, block_bytes)  # [num_slots, block_bytes]
        self._thread = threading.Thread(target=self._prepare, name="kvtier-host-slab", daemon=True)
        self._thread.start()

    @property
    def prepared(self) -> bool:
        """Whether every piece is backed (and pinned, with CUDA)."""
        return self.prepared_bytes == self.num_bytes

    @property
    def span(self) -> tuple[int, int, int]:
        """File descriptor, address in this process, and bytes: for a process that maps the same memory."""
        return self._file, self.blocks.ctypes.data, self.num_bytes

    def wait_prepared(self, timeout_s: float) -> bool:
        """Wait for `prepared`, for *timeout_s* at most; whether it is."""
        self._thread.join(timeout_s)
        return self.prepared

    def close(self) -> None:
        """End the background work, unpin. The memory goes when the last view of `blocks` does."""
        self._stop.set()
        self._thread.join()
        while self._unpins:
            self._unpins.pop()()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _prepare(self) -> None:
        base = self.blocks.ctypes.data
        # Whole slots and whole pages: a copy may not begin in one registration and end in another.
        unit = math.lcm(self.block_bytes, mmap.PAGESIZE)
        piece_bytes = unit * max(1, PIECE_BYTES // unit)
        try:
            for start in range(0, self.num_bytes, piece_bytes):
                if self._stop.is_set():
                    return
                length = min(piece_bytes, self.num_bytes - start)
                os.posix_fallocate(self._file, start, length)
                self._map_pages(start, length)
                if self._pin is not None:
                    self._unpins.append(self._pin(base + start, length))
                self.prepared_bytes = start + length
        except Exception as error:  # a thread's top; unprepared slots work, only slower
            log.warning(
                "host slab: prepared %d of %d bytes, the rest stays slower: %s",
                self.prepared_bytes,
                self.num_bytes,
                error,
            )

    def _map_pages(self, start: int, length: int) -> None:
        """Enter the pages in the page table, so that a first copy is as fast as a later one (else 6 times slower)."""
        for offset in range(start, start + length, MAP_STEP_BYTES):
            if self._stop.is_set():
                return
            try:
                self._map.madvise(MADV_POPULATE_WRITE, offset, min(MAP_STEP_BYTES, start + length - offset))
            except OSError:  # Linux before 5.14 does not know it; the first copies are slower then
                return
