"""The file of an index under LMDB's map: disk space that is taken before pages need it, and syncs that are believed."""

import errno
import os
import threading

import lmdb

from kvtier.store.slab import PAGE_BYTES

SPARE_PAGES = 64  # left free by every change that adds: what a deletion of 8 records needs, three levels deep
LITTLE_BYTES = SPARE_PAGES * PAGE_BYTES  # of pages that a change may make new that removes 8 records at most
_AHEAD_BYTES = 8 << 20  # of disk space that is taken at a time


class IndexFile:
    """The data file of *env*, open as *descriptor*; both are its own. Any thread syncs, the writer does the rest."""

    def __init__(self, env: lmdb.Environment, descriptor: int) -> None:
        self.env = env
        self._descriptor: int | None = descriptor
        self._syncing = threading.Lock()
        self.is_doubtful = False  # the last sync failed; `_syncing` guards it
        self.reserved_bytes = self.used_bytes()  # pages in use got their disk space before they were

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    @property
    def is_removed(self) -> bool:
        """Whether the index has no name any more: what is written to it is gone when it is closed."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Unmap; a transaction still open elsewhere would crash the process. Once more does nothing."""
        self.env.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def used_bytes(self) -> int:
        """Bytes of the pages up to the last one in use."""
        return (self.env.info()["last_pgno"] + 1) * PAGE_BYTES

    def taken_bytes(self) -> int:
        """What the file takes on the medium."""
        return os.fstat(self._open_descriptor()).st_blocks * 512

    def sync(self) -> None:
        """Return when the file, as it was at the call, is on the medium. OSError or lmdb.Error, and from then on until
        the writer has called `write_again`."""
        with self._syncing:
            if self.is_doubtful:
                raise OSError(errno.EIO, "the index could not be synced before")
            try:
                self.env.sync(True)
            except lmdb.Error:
                self.is_doubtful = True
                raise

    def write_again(self) -> None:
        """Have all pages written by the next sync. The kernel takes what it could not write for written, and says so
        once; then a sync works that has done nothing, and a checkpoint would be believed that is not there."""
        descriptor = self._open_descriptor()
        with self._syncing:
            for start in range(0, self.used_bytes(), _AHEAD_BYTES):
                pages = os.pread(descriptor, _AHEAD_BYTES, start)
                if os.pwrite(descriptor, pages, start) < len(pages):
                    raise OSError(errno.EIO, "the index could not be written again")
            self.is_doubtful = False

    def reserve(self, new_bytes: int) -> None:
        """Have disk space for *new_bytes* beyond the pages in use; OSError if there is none.

        Writing to a hole of a mapped file on a full disk is SIGBUS, not ENOSPC.
        """
        map_bytes = self.env.info()["map_size"]
        wanted = min(self.used_bytes() + new_bytes, map_bytes)
        if wanted > self.reserved_bytes:
            try:
                self._reserve_up_to(min(wanted + _AHEAD_BYTES, map_bytes))
            except OSError:  # perhaps there is room for what is needed
                self._reserve_up_to(wanted)

    def is_nearly_full(self, new_bytes: int) -> bool:
        """Whether *new_bytes* and the spare pages might not fit after the last page in use."""
        return self.used_bytes() + new_bytes + LITTLE_BYTES > self.env.info()["map_size"]

    def _reserve_up_to(self, end: int) -> None:
        os.posix_fallocate(self._open_descriptor(), self.reserved_bytes, end - self.reserved_bytes)
        self.reserved_bytes = end

    def _open_descriptor(self) -> int:
        assert self._descriptor is not None, "the index is closed"
        return self._descriptor
