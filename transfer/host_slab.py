"""HostSlab: the host memory for the KV blocks of one attention group, allocated and pinned in the background."""

import errno
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable
from io import FileIO

import numpy as np
import numpy.typing as npt

from kvtier.transfer.pages import back_file, map_pages, prefer_node, reserves_all

log = logging.getLogger(__name__)

# Pins a number of bytes at an address and returns the function that unpins them.
Pin = Callable[[int, int], Callable[[], None]]
# Every CUDA call of the process waits while a piece is registered (pinned). At the slowest reported speed, 1 GB/s, that
# takes 34 ms. The promised limit is 50 ms (bench/transfer/gpu_copies.py measures it). One registration of >= 512 GiB
# fails, because the driver keeps 16 bytes per page in one allocation of at most 2 GiB.
PIECE_BYTES = 32 << 20
YIELD_S = 0.001  # pause between registrations, for the calls that queue at the driver's lock
ST_BLOCK_BYTES = 512  # unit of `st_blocks` on every file system
BACKED_LOOK_S = 0.1  # polling interval while another process backs its file


class HostSlab:
    """Host memory for KV blocks: *num_slots* slots of *block_bytes* each, in an anonymous memory file (`memfd`).

    The first use of memory is 8 to 18 times slower than reuse (DESIGN.md section 10). So a background thread "backs"
    the file (allocates its pages) piece by piece and, if *pin* is given, pins each piece. Slots that the thread has not
    reached yet work, but are slower. *node* is the preferred NUMA node. Whoever leases a slot owns its bytes.

    With *file*, a descriptor that the slab duplicates, the slots are at the beginning of another process's file. The
    other process backs this file, so that the pages count against its memory limit. The slab's thread prepares
    a piece only after the other process has backed the piece.
    """

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        pin: Pin | None = None,
        node: int | None = None,
        file: int | None = None,
    ) -> None:
        """Map the slots, and start the thread that allocates their pages (on NUMA node *node*) and calls *pin*.

        Raises:
            OSError: The memory cannot be allocated, or *file* is too short.
        """
        self.block_bytes = block_bytes
        self.num_bytes = num_slots * block_bytes
        self.slots_per_piece = slots_per_piece(block_bytes, PIECE_BYTES)
        self.prepared_bytes = 0
        self.copied = False  # whether blocks were copied since the last piece was pinned; see `pause_s`
        self._pin = pin
        self._unpins: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._is_own = file is None
        number = os.memfd_create("kvtier-host-slab", os.MFD_CLOEXEC) if file is None else os.dup(file)
        # A file object rather than a descriptor, so that it is closed exactly once, also if the slab is only dropped.
        self._file = FileIO(number, "r+")
        try:
            if file is None:
                self._file.truncate(max(self.num_bytes, mmap.PAGESIZE))
                if self.num_bytes and reserves_all():
                    back_file(
                        number, 0, self.num_bytes
                    )  # otherwise using a slot before `_prepare` reaches it raises SIGBUS
            elif (length := os.fstat(file).st_size) < self.num_bytes:
                raise OSError(errno.EINVAL, f"the file has {length} bytes")
            mapped = mmap.mmap(number, max(self.num_bytes, mmap.PAGESIZE if self._is_own else 1))
        except OSError as error:
            self._file.close()
            raise OSError(
                error.errno, f"host capacity: cannot allocate {self.num_bytes} bytes ({error.strerror}); lower it"
            ) from error
        flat = np.frombuffer(mapped, dtype=np.uint8, count=self.num_bytes)
        self.blocks: npt.NDArray[np.uint8] = flat.reshape(num_slots, block_bytes)  # [num_slots, block_bytes]
        if (
            node is not None
            and self._is_own
            and num_slots
            and not prefer_node(self.blocks.ctypes.data, self.num_bytes, node)
        ):
            log.warning(
                "host slab: the kernel refuses to place memory on node %d, the GPU's NUMA node; copies may be slow",
                node,
            )
        self._thread = threading.Thread(target=self._prepare, name="kvtier-host-slab", daemon=True)
        self._thread.start()

    @property
    def prepared(self) -> bool:
        """True if all slots are allocated and, with CUDA, pinned."""
        return self.prepared_bytes == self.num_bytes

    @property
    def num_pinned_slots(self) -> int:
        """Number of slots pinned so far. They are the first slots."""
        return 0 if self._pin is None else self.prepared_bytes // self.block_bytes

    @property
    def span(self) -> tuple[int, int, int]:
        """Descriptor of the memory file, address of the slots in this process, and size of the slots in bytes.

        Another process needs these values to map the slots too. Raises ValueError if the slab is closed.
        """
        return self._file.fileno(), self.blocks.ctypes.data, self.num_bytes

    def wait_prepared(self, timeout_s: float) -> bool:
        """Wait up to *timeout_s* for the background thread, and return whether the slab is `prepared`."""
        self._thread.join(timeout_s)
        return self.prepared

    def close(self) -> None:
        """End the background thread and unpin the slots. Idempotent.

        The memory is freed when the last view of `blocks` is gone.
        """
        self._stop.set()
        self._thread.join()
        while self._unpins:
            self._unpins.pop()()
        self._file.close()

    def _prepare(self) -> None:
        base, piece_bytes = self.blocks.ctypes.data, self.slots_per_piece * self.block_bytes
        try:
            for start in range(0, self.num_bytes, piece_bytes):
                if self._stop.is_set():
                    return
                length = min(piece_bytes, self.num_bytes - start)
                if not self._is_own and not self._wait_backed(start + length):
                    return
                started = time.monotonic()
                if self._is_own:
                    back_file(self._file.fileno(), start, length)
                map_pages(base + start, length)
                if self._pin is not None:
                    self._unpins.append(self._pin(base + start, length))
                self.prepared_bytes = start + length
                if self._pin is not None:
                    self._stop.wait(pause_s(time.monotonic() - started, self.copied))
                    self.copied = False
        except Exception as error:  # last handler of the thread; unprepared slots work, but are slower
            log.warning(
                "host slab: only %d of %d bytes could be prepared for fast copies; the other slots stay slower: %s",
                self.prepared_bytes,
                self.num_bytes,
                error,
            )

    def _wait_backed(self, end: int) -> bool:
        """Wait until another process has allocated the file's first *end* bytes; return False if `close` is called."""
        while os.fstat(self._file.fileno()).st_blocks * ST_BLOCK_BYTES < end:
            if self._stop.wait(BACKED_LOOK_S):
                return False
        return True


def slots_per_piece(block_bytes: int, piece_bytes: int) -> int:
    """Return the number of slots to allocate and pin at a time, as one piece of about *piece_bytes*.

    A piece has whole pages. It has whole slots, because a copy may not cross the border between two pinned pieces.
    """
    unit = math.lcm(block_bytes, mmap.PAGESIZE) // block_bytes
    return unit * max(1, piece_bytes // (unit * block_bytes))


def pause_s(took_s: float, copied: bool) -> float:
    """Return the seconds to pause after a piece of memory has been pinned in *took_s* seconds.

    Pinning delays copies. So if blocks were *copied* since the last piece, the pause is as long as the pinning.
    """
    return took_s if copied else YIELD_S
