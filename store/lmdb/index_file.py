"""`IndexFile`: the file under LMDB's map, which reserves disk space early and never trusts a failed sync."""

import errno
import os
import threading

import lmdb

from kvtier.store.slab import PAGE_BYTES

SPARE_PAGES = 64  # left free by each change that adds: removing or moving 8 records needs them, three levels deep
MIN_REMOVAL_BYTES = SPARE_PAGES * PAGE_BYTES  # new pages that removing or moving at most 8 records may need
_AHEAD_BYTES = 8 << 20  # disk space reserved at a time


class IndexFile:
    """The data file of *env*, open as *descriptor*, and owner of both.

    Any thread may call `sync`; only the writer calls the other methods.
    """

    def __init__(self, env: lmdb.Environment, descriptor: int) -> None:
        self.env = env
        self._descriptor: int | None = descriptor
        self._syncing = threading.Lock()
        self.sync_failed = False  # whether the last sync failed; `_syncing` guards it
        self.reserved_bytes = self.used_bytes()  # pages in use have their disk space

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    @property
    def is_removed(self) -> bool:
        """Whether the file has been deleted, so that its content is lost once it is closed."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Unmap and close the file. A transaction still open would crash the process. A second call does nothing."""
        self.env.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def used_bytes(self) -> int:
        """Return the bytes of the file up to the last page in use."""
        return (self.env.info()["last_pgno"] + 1) * PAGE_BYTES

    def taken_bytes(self) -> int:
        """Return the disk space that the file takes."""
        return os.fstat(self._open_descriptor()).st_blocks * 512

    def sync(self) -> None:
        """Block until the file, as it was at the call, is on disk.

        Raises OSError or lmdb.Error if that fails. From then on every call raises until the writer has called
        `rewrite`.
        """
        with self._syncing:
            if self.sync_failed:
                raise OSError(errno.EIO, "an earlier sync of the index failed")
            try:
                self.env.sync(True)
            except lmdb.Error:
                self.sync_failed = True
                raise

    def rewrite(self) -> None:
        """Write all pages to the file again, so that the next sync writes them to disk.

        The kernel reports only once that it could not write pages, and then takes them for written. The next sync would
        succeed without writing anything, and a checkpoint that does not exist would be trusted.
        """
        descriptor = self._open_descriptor()
        with self._syncing:
            for start in range(0, self.used_bytes(), _AHEAD_BYTES):
                pages = os.pread(descriptor, _AHEAD_BYTES, start)
                if os.pwrite(descriptor, pages, start) < len(pages):
                    raise OSError(errno.EIO, "the index could not be written again")
            self.sync_failed = False

    def reserve(self, new_bytes: int) -> None:
        """Reserve disk space for *new_bytes* beyond the pages in use. Raises OSError if there is none.

        Writing to a hole of a mapped file on a full disk is SIGBUS, not ENOSPC.
        """
        map_bytes = self.env.info()["map_size"]
        wanted = min(self.used_bytes() + new_bytes, map_bytes)
        if wanted > self.reserved_bytes:
            try:
                self._reserve_up_to(min(wanted + _AHEAD_BYTES, map_bytes))
            except OSError:  # perhaps there is room for exactly what is needed
                self._reserve_up_to(wanted)

    def is_nearly_full(self, new_bytes: int) -> bool:
        """Return whether *new_bytes* and the spare pages might not fit after the last page in use."""
        return self.used_bytes() + new_bytes + MIN_REMOVAL_BYTES > self.env.info()["map_size"]

    def _reserve_up_to(self, end: int) -> None:
        os.posix_fallocate(self._open_descriptor(), self.reserved_bytes, end - self.reserved_bytes)
        self.reserved_bytes = end

    def _open_descriptor(self) -> int:
        assert self._descriptor is not None, "the index is closed"
        return self._descriptor
