"""The files of an LMDB store: how large they may get, and whether those left by an earlier process can be used."""

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
MOST_CRASHES = 2  # of processes in a row on one file: one may have had another cause, as a page that was not read
_COPY = "compact"  # a folder
BESIDES_BYTES = 1 << 20  # at most: marks, lock files, the file system's own blocks for the files
_LEAST_INDEX_BYTES = 8 << 20
# The tree itself is broken, not one payload; a file like this is not opened again. (Bad transaction:
# what LMDB says when the root of a sub-database is broken. Any other error ends our transactions.)
DAMAGE = (  # what LMDB says, and `lmdb_rows`
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
    """Blocks of one change at most; it bounds how much waits to be used again."""
    return min(32 << 20, max(1 << 20, capacity_bytes // 32))


def slab_bytes(capacity_bytes: int) -> int:
    """What all slots may take: the records, and those that were freed and cannot be written to yet."""
    return capacity_bytes * 9 // 8 + 2 * part_bytes(capacity_bytes)


def index_bytes(capacity_bytes: int) -> int:
    """Size of the map, which the data file never exceeds. An eighth is enough for blocks of one page; more is never
    used for larger ones."""
    wanted = capacity_bytes // 8 + _LEAST_INDEX_BYTES
    return -(-wanted // PAGE_BYTES) * PAGE_BYTES


def most_bytes(capacity_bytes: int) -> int:
    """What the folder of a store takes on the medium at most."""
    return slab_bytes(capacity_bytes) + index_bytes(capacity_bytes) + BESIDES_BYTES


def capacity_within(disk_bytes: int) -> int:
    """The largest capacity whose folder stays within *disk_bytes* on the medium; 0 if there is none."""
    return _largest(most_bytes, disk_bytes)


def capacity_of_slabs(disk_bytes: int) -> int:
    """The largest capacity whose slots stay within *disk_bytes*; 0 if there is none."""
    return _largest(slab_bytes, disk_bytes)


def _largest(taken_bytes: Callable[[int], int], limit_bytes: int) -> int:
    low, high = 0, limit_bytes
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if taken_bytes(middle) <= limit_bytes else (low, middle - 1)
    return low


def recorded_capacity(folder: Folder) -> int:
    """The capacity with which the store in *folder* was last opened; OSError if there is no store to be used."""
    if not (folder.here / DATA).exists():
        raise FileNotFoundError(f"store {folder.name}: there is none; give the folder that [disk] path names")
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
    """The tables in *folder*, empty ones if those there cannot be trusted.

    Of what is there nothing is changed, so the mark stays true. The caller holds the folder's lock, and writes the mark
    of the level once that much is true, before the first change.
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
    """The tables in *folder*, which are trusted."""
    present = (folder.here / DATA).stat().st_size if (folder.here / DATA).exists() else 0
    return open_tables(folder.here, max(index_bytes(capacity_bytes), present), durability)


def compact(folder: Folder, tables: Tables, capacity_bytes: int, durability: Durability) -> Tables:
    """The same index in a file without free pages, for a store with a lowered capacity; as it is, if there is no room
    for a copy. The mark must be CLEAN, and it is true of either file."""
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
        _log.warning("store %s: its index stays larger than it should, it cannot be copied: %s", folder.name, error)
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
    """Remove data file and slabs, and promise nothing. Killed in between, the next start goes on with it."""
    for name in (DATA, "lock.mdb"):
        (folder.here / name).unlink(missing_ok=True)
    Slabs.remove(folder.here)
    sync_folder(folder.here)
    BootMark(current_boot_id(), FileState.PROCESS).write(folder.here)


def _restore_or_refuse(folder: Folder) -> str | None:
    """Why the data file must not even be opened; None if it may. Takes one back to its last checkpoint if need be."""
    mark = BootMark.read(folder.here)
    if mark is None:
        return "it has no readable boot mark"
    if mark.is_of_another_layout:
        return f"its layout is {mark.layout}, another than this program's"
    reason = damage_of(mark)
    if reason is None and mark.saw_crash and mark.state is not FileState.COMMIT:
        if mark.state is not FileState.INTERVAL or not restore(folder.here):
            reason = "the machine went down while it was open"
        else:
            _log.warning(
                "store %s goes back to its last checkpoint: the machine went down while it was open", folder.name
            )
    return reason


def damage_of(mark: BootMark) -> str | None:
    """Why the tree in the data file must be taken for broken; None if nothing says so."""
    if mark.state is FileState.DAMAGED:
        return "its tree was found damaged"
    if mark.num_crashes >= MOST_CRASHES:
        return f"{mark.num_crashes} processes in a row crashed on it"
    return None
