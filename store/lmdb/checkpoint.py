"""Checkpoints: copies of the root of LMDB's data file, to which a store returns after a machine crash.

LMDB never overwrites a page that can be reached from the newest root, or from the root that a read transaction uses. So
a read transaction on the root that was synced last keeps all pages of that root on disk unchanged. Only the root itself
is overwritten: LMDB keeps roots in the first two pages, alternately. Putting back a copy of these two pages after a
crash restores the file to the checkpoint. The copy is written twice, each time with a checksum, so that a flipped bit
does no harm.
"""

import os
from contextlib import suppress
from pathlib import Path

import lmdb
import xxhash

from kvtier.store.folder import open_or_make, open_private, sync_folder
from kvtier.store.lmdb.tables import Tables, keep_when_forked

_NAME = "checkpoint"
_CHECKSUM_BYTES = 16


class Checkpoint:
    """The checkpoints of one LMDB environment. After a machine crash the store returns to the last one.

    A checkpoint is a copy of the root, LMDB's two meta pages, which lead to all other pages. An open read transaction
    keeps LMDB from overwriting the pages that the last checkpoint leads to.

    Only the store's writer calls `take`, right after it has synced the file. The store must not change between the
    start of that sync and the end of `take`. Pages freed since the last checkpoint can be reused only after the next
    one, so a store that runs out of pages takes a checkpoint.
    """

    def __init__(self, folder: Path, tables: Tables) -> None:
        self._folder = folder
        self._tables = tables
        self.last_change: int | None = None  # number of the last change in the last checkpoint; None without one
        self._reader: lmdb.Transaction[bytes] | None = None

    def take(self) -> None:
        """Take a checkpoint: save a copy of the meta pages of LMDB's data file. The caller must have synced the file.

        Raises OSError or lmdb.Error. The previous checkpoint then stays valid.
        """
        reader = self._tables.env.begin()
        keep_when_forked(reader)
        try:
            with open(self._folder / "data.mdb", "rb", opener=open_private) as data:
                root = data.read(2 * self._tables.env.stat()["psize"])
            last_change = self._tables.counters(reader).num_changes
            _keep(self._folder, root)
        except BaseException:
            reader.abort()
            raise
        self.close()
        self._reader = reader
        self.last_change = last_change

    def close(self) -> None:
        """End the read transaction, so that LMDB may overwrite pages of the last checkpoint."""
        if self._reader is not None:
            self._reader.abort()
            self._reader = None


def restore(folder: Path) -> bool:
    """Restore the data file in *folder* to its last checkpoint. Returns False if there is no valid checkpoint."""
    try:
        with open(folder / _NAME, "rb", opener=open_private) as file:
            root = _whole(file.read())
        if root is None:
            return False
        data = open_private(folder / "data.mdb", os.O_RDWR)
    except OSError:
        return False
    try:
        os.pwrite(data, root, 0)
        os.fsync(data)
    finally:
        os.close(data)
    return True


def _whole(kept: bytes) -> bytes | None:
    for copy in (kept[: len(kept) // 2], kept[len(kept) // 2 :]):
        root, checksum = copy[:-_CHECKSUM_BYTES], copy[-_CHECKSUM_BYTES:]
        if xxhash.xxh3_128_digest(root) == checksum:
            return root
    return None


def _keep(folder: Path, root: bytes) -> None:
    fresh = folder / f"{_NAME}.new"
    with open(fresh, "r+b", opener=open_or_make) as file:
        num_bytes = file.write(2 * (root + xxhash.xxh3_128_digest(root)))
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / _NAME)
    sync_folder(folder)
    # Reserve room for the next checkpoint, which a store needs even on a full disk: see `Checkpoint`.
    with suppress(OSError), open(fresh, "r+b", opener=open_or_make) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
