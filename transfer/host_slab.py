"""HostSlab: the host's block slots in one memory file, backed and, with CUDA, pinned piece by piece."""

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

# Pins num_bytes of memory at an address; gives the function that undoes it.
Pin = Callable[[int, int], Callable[[], None]]
# Every CUDA call of the process waits while a piece is registered: 34 ms at 1 GB/s, the slowest speed reported,
# against the 50 ms promised (bench/transfer/gpu_copies.py measures it). One registration of >= 512 GiB fails: the
# driver keeps 16 bytes a page in one allocation of 2 GiB at most.
PIECE_BYTES = 32 << 20
YIELD_S = 0.001  # between registrations, for the calls that queue at the driver's lock
ST_BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system's blocks are
BACKED_LOOK_S = 0.1  # between looks at how much of another process's file is backed


class HostSlab:
    """*num_slots* slots of *block_bytes* each in a memory file (`memfd`), of which a killed process leaves nothing.

    The bytes of a slot belong to the lease's owner. Memory touched for the first time is 8 to 18 times slower
    than reused memory (measured; DESIGN.md section 10), so a background thread backs the file piece by piece and,
    when *pin* is given, pins each piece; slots that it has not reached yet work, only slower. *node* is where the
    pages should lie on a machine with several memory nodes.

    *file* is the descriptor of a file of another process, whose beginning the slots are; the slab has a duplicate of
    it. That process backs it, from the front: whoever touches a page first is charged with it.
    """

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        pin: Pin | None = None,
        node: int | None = None,
        file: int | None = None,
    ) -> None:
        """OSError, with what to do, if there is no memory for so many slots, or *file* is shorter."""
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.num_bytes = num_slots * block_bytes
        self.slots_per_piece = slots_per_piece(block_bytes, PIECE_BYTES)
        self.prepared_bytes = 0
        self.copied = False  # set by copies of blocks; cleared with each piece, which then rests (`pause_s`)
        self._pin = pin
        self._unpins: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._is_own = file is None
        number = os.memfd_create("kvtier-host-slab", os.MFD_CLOEXEC) if file is None else os.dup(file)
        # A file object, and no number: it is closed once, and with the slab if that is dropped.
        self._file = FileIO(number, "r+")
        try:
            if file is None:
                self._file.truncate(max(self.num_bytes, mmap.PAGESIZE))
                if self.num_bytes and reserves_all():
                    back_file(
                        number, 0, self.num_bytes
                    )  # else a slot that is used before `_prepare` comes to it is SIGBUS
            elif (length := os.fstat(file).st_size) < self.num_bytes:
                raise OSError(errno.EINVAL, f"the file has {length}")
            mapped = mmap.mmap(number, max(self.num_bytes, mmap.PAGESIZE if self._is_own else 1))
        except OSError as error:
            self._file.close()
            raise OSError(
                error.errno, f"host capacity: {self.num_bytes} bytes cannot be had ({error.strerror}); lower it"
            ) from error
        flat = np.frombuffer(mapped, dtype=np.uint8, count=self.num_bytes)
        self.blocks: npt.NDArray[np.uint8] = flat.reshape(num_slots, block_bytes)  # [num_slots, block_bytes]
        if (
            node is not None
            and self._is_own
            and num_slots
            and not prefer_node(self.blocks.ctypes.data, self.num_bytes, node)
        ):
            log.warning("host slab: the kernel refuses to place memory on node %d, next to the GPU", node)
        self._thread = threading.Thread(target=self._prepare, name="kvtier-host-slab", daemon=True)
        self._thread.start()

    @property
    def prepared(self) -> bool:
        """Whether every piece is backed (and pinned, with CUDA)."""
        return self.prepared_bytes == self.num_bytes

    @property
    def num_pinned_slots(self) -> int:
        """Slots from 0 on that are pinned; only grows until `close`. Whole slots: a piece ends where a slot does."""
        return 0 if self._pin is None else self.prepared_bytes // self.block_bytes

    @property
    def span(self) -> tuple[int, int, int]:
        """The memory file's descriptor, its address in this process, and its bytes: for a process that maps it too.

        ValueError once the slab is closed."""
        return self._file.fileno(), self.blocks.ctypes.data, self.num_bytes

    def wait_prepared(self, timeout_s: float) -> bool:
        """Wait until the slab is `prepared`, for *timeout_s* at most; whether it is."""
        self._thread.join(timeout_s)
        return self.prepared

    def close(self) -> None:
        """End the background thread and unpin. The memory is freed when the last view of `blocks` is. Idempotent."""
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
        except Exception as error:  # a thread's top; unprepared slots work, only slower
            log.warning(
                "host slab: prepared %d of %d bytes, the rest stays slower: %s",
                self.prepared_bytes,
                self.num_bytes,
                error,
            )

    def _wait_backed(self, end: int) -> bool:
        """Wait until the process whose file it is has backed it up to *end*; False if the slab is closed before."""
        while os.fstat(self._file.fileno()).st_blocks * ST_BLOCK_BYTES < end:
            if self._stop.wait(BACKED_LOOK_S):
                return False
        return True


def slots_per_piece(block_bytes: int, piece_bytes: int) -> int:
    """Slots that are backed and pinned at a time: whole slots and whole pages, about *piece_bytes*.

    A copy may not begin in one registration and end in another. So a block that no page size divides makes larger
    pieces, of as many as 4,096 blocks; real blocks are multiples of 256 bytes, which is 16.
    """
    unit = math.lcm(block_bytes, mmap.PAGESIZE) // block_bytes
    return unit * max(1, piece_bytes // (unit * block_bytes))


def pause_s(took_s: float, copied: bool) -> float:
    """Seconds to rest after a piece: as long as it took if blocks were copied meanwhile, else `YIELD_S`."""
    return took_s if copied else YIELD_S
