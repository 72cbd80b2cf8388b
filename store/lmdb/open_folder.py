"""`OpenFolder`: the open folder of a store, with its lock, index and slabs."""

import errno
from contextlib import ExitStack
from pathlib import Path

import lmdb

from kvtier.store.durability import Durability
from kvtier.store.folder import Folder
from kvtier.store.lmdb import data_file
from kvtier.store.lmdb.boot_mark import BootMark, FileState, current_boot_id
from kvtier.store.lmdb.tables import Tables
from kvtier.store.owner_lock import OwnerLock
from kvtier.store.slab import Slabs


class OpenFolder:
    """Owns the folder, lock, tables and slabs: `close` closes them. *tables* is replaced when the index is reopened."""

    def __init__(
        self, folder: Folder, lock: OwnerLock, tables: Tables, capacity_bytes: int, durability: Durability
    ) -> None:
        self._folder = folder
        self._lock = lock
        self.tables = tables
        self.slabs = Slabs(folder.here)
        self.capacity_bytes = capacity_bytes
        self.durability = durability

    @property
    def here(self) -> Path:
        """A path to the open folder, whatever its name leads to now."""
        return self._folder.here

    @property
    def is_index_open(self) -> bool:
        """False after `reopen_index` has failed."""
        return self.tables.file.is_open

    @property
    def is_removed(self) -> bool:
        """Whether the file of the index has been deleted."""
        return self.tables.file.is_removed

    def read_mark(self) -> BootMark | None:
        """The boot mark in the folder; None if there is no valid one."""
        return BootMark.read(self.here)

    def mark(self, state: FileState, num_crashes: int = 0) -> None:
        """Write the boot mark: in this boot the files are in *state*."""
        BootMark(current_boot_id(), state, num_crashes=num_crashes).write(self.here)

    def sync(self) -> None:
        """Return when all that was written is on the medium, or raise OSError or lmdb.Error. For the writer only."""
        if self.tables.file.is_doubtful:
            self.tables.file.write_again()
        self.slabs.sync()
        self.tables.file.sync()

    def taken_bytes(self) -> int:
        """Bytes that index and slabs take on the medium."""
        return self.tables.file.taken_bytes() + self.slabs.file_bytes()

    def reopen_index(self) -> None:
        """Close the index, which LMDB gave up, and open it as it was before. OSError or lmdb.Error if that fails."""
        self.tables.file.close()
        self.tables = data_file.reopen(self._folder, self.capacity_bytes, self.durability)

    def compact_index(self) -> None:
        """Replace the index by a copy without free pages. The mark must be CLEAN."""
        self.tables = data_file.compact(self._folder, self.tables, self.capacity_bytes, self.durability)

    def close(self) -> None:
        """Close the slabs, unmap the index, and free the folder's lock."""
        with ExitStack() as let_go:
            let_go.callback(self._folder.close)
            let_go.callback(self._lock.release)
            let_go.callback(self.tables.file.close)
            let_go.callback(self.slabs.close)


def open_folder(path: Path, capacity_bytes: int | None, durability: Durability, owner: int | None) -> OpenFolder:
    """Open the store in the folder *path*, which is made if there is none. `FolderInUse` if another process has it.

    *capacity_bytes* None stands for the recorded capacity; then OSError if there is no store, or a broken one.
    """
    with ExitStack() as undo:
        folder = undo.enter_context(Folder(path) if capacity_bytes is None else Folder.make(path))
        lock = OwnerLock(folder, owner)
        undo.callback(lock.release)
        try:
            if capacity_bytes is None:
                capacity_bytes = data_file.recorded_capacity(folder)
                tables = data_file.reopen(folder, capacity_bytes, durability)
            else:
                tables = data_file.open_trusted(folder, capacity_bytes, durability)
        except lmdb.Error as error:
            raise OSError(errno.EIO, f"store {path}: {error}") from error
        undo.callback(tables.file.close)
        opened = OpenFolder(folder, lock, tables, capacity_bytes, durability)
        undo.pop_all()
    return opened
