"""`IndexFile`: the file under LMDB's map. It takes disk space before pages need it, and never trusts a failed sync."""

import errno
import os
import threading

import lmdb

from kvtier.store.slab import PAGE_BYTES

SPARE_PAGES = 64  # that each change that adds leaves free: for 3 evictions and 3 second chances, three levels deep
LITTLE_BYTES = SPARE_PAGES * PAGE_BYTES
_AHEAD_BYTES = 8 << 20  # disk space taken at a time


class IndexFile:
    """The data file of *env*, open as *descriptor*; it owns both. Any thread may sync; the writer makes other calls."""

    def __init__(self, env: lmdb.Environment, descriptor: int) -> None:
        self.env = env
        self._descriptor: int | None = descriptor
        self._syncing = threading.Lock()
        self.is_doubtful = False  # whether the last sync failed; `_syncing` guards it
        self.reserved_bytes = self.used_bytes()  # pages in use have their disk space

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    @property
    def is_removed(self) -> bool:
        """Whether the file has been deleted: its content is lost once it is closed."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Unmap and close. A transaction still open would crash the process. A second call does nothing."""
        self.env.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def used_bytes(self) -> int:
        """Bytes of the file up to the last page in use."""
        return (self.env.info()["last_pgno"] + 1) * PAGE_BYTES

    def taken_bytes(self) -> int:
        """Bytes that the file takes on the medium."""
        return os.fstat(self._open_descriptor()).st_blocks * 512

    def sync(self) -> None:
        """Return when the file, as it was at the call, is on the medium.

        OSError or lmdb.Error if that fails. From then on every call raises until the writer has called `write_again`.
        """
        with self._syncing:
            if self.is_doubtful:
                raise OSError(errno.EIO, "the index could not be synced before")
            try:
                self.env.sync(True)
            except lmdb.Error:
                self.is_doubtful = True
                raise

    def write_again(self) -> None:
        """Write all pages to the file again, so that the next sync writes them to the medium.

        The kernel reports once that it could not write pages, and then takes them for written: the next sync would
        succeed without writing anything, and a checkpoint be trusted that is not there.
        """
        descriptor = self._open_descriptor()
        with self._syncing:
            for start in range(0, self.used_bytes(), _AHEAD_BYTES):
                pages = os.pread(descriptor, _AHEAD_BYTES, start)
                if os.pwrite(descriptor, pages, start) < len(pages):
                    raise OSError(errno.EIO, "the index could not be written again")
            self.is_doubtful = False

    def reserve(self, new_bytes: int) -> None:
        """Take disk space for *new_bytes* beyond the pages in use; OSError if there is none.

        Writing to a hole of a mapped file on a full disk is SIGBUS, not ENOSPC.
        """
        map_bytes = self.env.info()["map_size"]
        wanted = min(self.used_bytes() + new_bytes, map_bytes)
        if wanted > self.reserved_bytes:
            try:
                self._reserve_up_to(min(wanted + _AHEAD_BYTES, map_bytes))
            except OSError:  # perhaps there is room without the step ahead
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
