"""Limits on the size of an LMDB store's files, and the decision whether a store can be opened with the files it has."""

import logging
import os
import shutil
from collections.abc import Callable

import lmdb

from kvtier.store.durability import Durability
from kvtier.store.folder import Folder, sync_folder
from kvtier.store.lmdb import roots as lmdb_roots
from kvtier.store.lmdb.boot_mark import BootMark, FileState, current_boot_id
from kvtier.store.lmdb.checkpoint import restore
from kvtier.store.lmdb.tables import MAX_DBS, Tables, open_tables
from kvtier.store.slab import PAGE_BYTES, Slabs

DATA = "data.mdb"
MAX_CRASHES = 2  # in a row on one file; a single crash may have another cause, such as an unreadable page
_COPY = "compact"  # the folder in which a compacted copy is made
OVERHEAD_BYTES = 1 << 20  # limit on the boot mark, the lock files and the file system's own blocks
_MIN_INDEX_BYTES = 8 << 20
# Errors of LMDB and of `tables` which mean that the tree itself is broken, not one payload. Such a file is not opened
# again. (LMDB says "bad transaction" when the root of a sub-database is broken.) Other errors only end the transaction.
DAMAGE = (
    lmdb.BadTxnError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.ProblemError,
    lmdb.VersionMismatchError,
)

_log = logging.getLogger(__name__)


def part_bytes(capacity_bytes: int) -> int:
    """Return the limit on the bytes of the blocks that are stored in one write transaction."""
    return min(32 << 20, max(1 << 20, capacity_bytes // 32))


def slab_bytes(capacity_bytes: int) -> int:
    """Return the limit on the bytes of all slots, including freed slots that cannot be reused yet."""
    return capacity_bytes * 9 // 8 + 2 * part_bytes(capacity_bytes)


def index_bytes(capacity_bytes: int) -> int:
    """Return the size of LMDB's memory map, which the data file never exceeds.

    An eighth of the capacity is enough even if each KV block takes only 4 KiB, the minimum; larger blocks need less.
    """
    wanted = capacity_bytes // 8 + _MIN_INDEX_BYTES
    return -(-wanted // PAGE_BYTES) * PAGE_BYTES


def max_bytes(capacity_bytes: int) -> int:
    """Return the limit on the disk space of a store's folder."""
    return slab_bytes(capacity_bytes) + index_bytes(capacity_bytes) + OVERHEAD_BYTES


def capacity_within(disk_bytes: int) -> int:
    """Return the largest capacity with which a store's folder takes at most *disk_bytes*, or 0 if there is none."""
    return _largest(max_bytes, disk_bytes)


def capacity_of_slabs(disk_bytes: int) -> int:
    """Return the largest capacity with which a store's slots take at most *disk_bytes*, or 0 if there is none."""
    return _largest(slab_bytes, disk_bytes)


def _largest(taken_bytes: Callable[[int], int], limit_bytes: int) -> int:
    low, high = 0, limit_bytes
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if taken_bytes(middle) <= limit_bytes else (low, middle - 1)
    return low


def recorded_capacity(folder: Folder) -> int:
    """Return the capacity with which the store in *folder* was last opened.

    Raises OSError if there is no store, or if it is broken.
    """
    if not (folder.here / DATA).exists():
        raise FileNotFoundError(f"no store in {folder.name}; give the folder that [disk] path names")
    reason = _restore_or_refuse(folder)
    if reason is not None:
        raise OSError(f"store {folder.name}: {reason}; the next engine that opens it starts empty")
    lmdb_roots.check(folder.here / DATA)
    env = lmdb.open(str(folder.here), readonly=True, max_dbs=MAX_DBS)
    try:
        return Tables.capacity_in(env)
    finally:
        env.close()


def open_trusted(folder: Folder, capacity_bytes: int, durability: Durability) -> Tables:
    """Open the tables in *folder*. If the files there cannot be trusted, start with an empty store instead.

    The caller must hold the folder's lock. Opening does not change trusted files, so the boot mark (the record of their
    state) stays correct. Before its first change, the caller must write the boot mark for its durability level. If that
    level requires synced files, the caller must sync them first.
    """
    shutil.rmtree(folder.here / _COPY, ignore_errors=True)
    if not (folder.here / DATA).exists() or (folder.here / DATA).stat().st_size == 0:
        _clear(folder)
    else:
        reason = _restore_or_refuse(folder)
        if reason is not None:
            _start_empty(folder, reason)
    try:
        if (folder.here / DATA).exists():
            lmdb_roots.check(folder.here / DATA)
        return reopen(folder, capacity_bytes, durability)
    except DAMAGE as error:
        _start_empty(folder, str(error))
        return reopen(folder, capacity_bytes, durability)


def reopen(folder: Folder, capacity_bytes: int, durability: Durability) -> Tables:
    """Open the tables in *folder*, whose files are known to be trustworthy."""
    present = (folder.here / DATA).stat().st_size if (folder.here / DATA).exists() else 0
    return open_tables(folder.here, max(index_bytes(capacity_bytes), present), durability)


def compact(folder: Folder, tables: Tables, capacity_bytes: int, durability: Durability) -> Tables:
    """Copy the index to a file without free pages, and open the copy. Used after the capacity was lowered.

    If there is no room for a copy, the index stays as it is. Before the call, the index must be synced, and the boot
    mark (the small file that records the index's state) must say CLEAN, that is, fully synced. This is then true of the
    copy too, so a crash at any point does no harm.
    """
    copy = folder.here / _COPY
    try:
        copy.mkdir(mode=0o700)
        tables.env.copy(str(copy), compact=True)
        with (copy / DATA).open("rb") as file:
            os.fchmod(file.fileno(), 0o600)
            os.fsync(file.fileno())
    except DAMAGE:
        raise
    except (lmdb.Error, OSError) as error:
        _log.warning("store %s: the index could not be compacted, so its file stays too large: %s", folder.name, error)
        shutil.rmtree(copy, ignore_errors=True)
        return tables
    tables.file.close()
    (copy / DATA).replace(folder.here / DATA)
    shutil.rmtree(copy)
    sync_folder(folder.here)
    return open_tables(folder.here, index_bytes(capacity_bytes), durability)


def _start_empty(folder: Folder, reason: str) -> None:
    _log.warning("store %s starts empty: %s", folder.name, reason)
    _clear(folder)


def _clear(folder: Folder) -> None:
    # The data file is removed first. If the process is killed after that, the next start finds no data file, and clears
    # the folder again.
    for name in (DATA, "lock.mdb"):
        (folder.here / name).unlink(missing_ok=True)
    Slabs.remove(folder.here)
    sync_folder(folder.here)
    BootMark(current_boot_id(), FileState.PROCESS).write(folder.here)


def _restore_or_refuse(folder: Folder) -> str | None:
    """Restore the data file to its last checkpoint if needed. Returns why it must not be opened, or None if it may."""
    mark = BootMark.read(folder.here)
    if mark is None:
        return "it has no readable boot mark"
    if mark.is_of_another_layout:
        return f"its layout is {mark.layout}, which this version cannot read"
    reason = damage_of(mark)
    if reason is None and mark.saw_crash and mark.state is not FileState.COMMIT:
        if mark.state is not FileState.INTERVAL or not restore(folder.here):
            reason = "the machine went down while it was open"
        else:
            _log.warning(
                "store %s is restored to its last checkpoint: the machine went down while it was open", folder.name
            )
    return reason


def damage_of(mark: BootMark) -> str | None:
    """Return why the index counts as damaged according to *mark*, the record of its state, or None if it does not."""
    if mark.state is FileState.DAMAGED:
        return "its index was found damaged"
    if mark.num_crashes >= MAX_CRASHES:
        return f"{mark.num_crashes} processes in a row crashed on it"
    return None
