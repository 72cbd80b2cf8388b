"""Inspection of a store from outside. It changes nothing, and does not delay a process that has the store open."""

import contextlib
import errno
import os
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path

import lmdb

from kvtier.store.durability import Durability
from kvtier.store.folder import Folder, open_private
from kvtier.store.lmdb import roots as lmdb_roots
from kvtier.store.lmdb.boot_mark import BootMark, FileState
from kvtier.store.lmdb.data_file import DAMAGE, DATA, damage_of
from kvtier.store.lmdb.tables import RecordRow, Tables, ascending
from kvtier.store.record import NAMESPACE_BYTES

_ROWS_PER_LOOK = 4096  # rows per read transaction (10 ms), during which the owner cannot reuse pages that it frees
_DURABILITIES = {  # durability level of the process that wrote a boot mark with this state
    FileState.PROCESS: Durability.PROCESS,
    FileState.INTERVAL: Durability.INTERVAL,
    FileState.COMMIT: Durability.COMMIT,
}


class StoreLost(OSError):
    """Error raised if the index is broken or the store's files cannot be trusted. The message says why."""


class StoreDamaged(StoreLost):
    """Error raised if reading the index shows that it is broken.

    The damage is not recorded on disk yet, so an engine would still open the store (see `upkeep.mark_damaged`).
    """


class Condition(StrEnum):
    """State in which a store's data file was left."""

    CLEAN = "clean"  # closed and synced
    OPEN = "open"  # a process has it open
    LEFT_OPEN = "left open"  # not closed by a process that has ended; intact nevertheless
    MACHINE_DOWN = "machine went down"  # the machine crashed while a process had the file open
    DAMAGED = "damaged"  # its tree was found broken, or processes crashed on it
    OTHER_LAYOUT = "other layout"  # written by another version of this program
    UNKNOWN = "unknown"  # there is no readable boot mark


class NextStart(StrEnum):
    """Content of the store that the next engine finds when it opens the store."""

    WARM = "warm"  # all records
    CHECKPOINT = "last checkpoint"  # the records of the last checkpoint
    EMPTY = "empty"  # no records


@dataclass(frozen=True, slots=True)
class NamespaceUse:
    """Number and bytes of one namespace's records. Bytes are counted as in `StoreStatistics.stored_bytes`."""

    namespace: bytes
    num_records: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Content:
    """Counts of a store's content. The namespaces may not add up to the totals if the store changes meanwhile."""

    num_records: int
    stored_bytes: int
    capacity_bytes: int
    written_bytes_total: int
    evicted_total: int
    namespaces: tuple[NamespaceUse, ...]  # in the order of their names


@dataclass(frozen=True, slots=True)
class Inspection:
    """The state of a store at one moment, as `inspect` returns it.

    *durability* is the durability level of the process that has the store open, or has ended without closing it. It is
    None if there is no such process or its level is unknown. *owner* is the pid of the process that has the store open.
    It is None if there is no such process, or if that process runs in another container. *content* is None unless
    *next_start* is WARM, because the data file must not be opened otherwise.
    """

    folder: Path
    state: Condition
    next_start: NextStart
    durability: Durability | None
    owner: int | None
    file_bytes: int  # disk space that the folder's files take
    content: Content | None


def inspect(folder: Path) -> Inspection:
    """Return the state of the store in *folder*, read in steps so short that the store's owner is not delayed.

    Raises FileNotFoundError if there is no store, and StoreLost if it turns out to be broken. Reading a broken store
    may also crash the process. If the process is killed, its entry in LMDB's table of readers stays until the store's
    owner removes it.
    """
    require_store(folder)
    with Folder(folder) as opened:
        state, next_start = standing(opened.here)
        mark = BootMark.read(opened.here)
        return Inspection(
            folder=folder,
            state=state,
            next_start=next_start,
            durability=None if mark is None else _DURABILITIES.get(mark.state),
            owner=None if state is Condition.CLEAN else _owner(opened.here),
            file_bytes=_file_bytes(opened.here),
            content=_content(opened) if next_start is NextStart.WARM else None,
        )


def require_store(folder: Path) -> None:
    """Raise FileNotFoundError if there is no store in *folder*."""
    if not (folder / DATA).exists():
        raise FileNotFoundError(f"no store in {folder}; give the folder that [disk] path names")


def standing(folder: Path) -> tuple[Condition, NextStart]:
    """Return how the data file in *folder* was left, and what the next engine will find.

    Does not read the data file, but its boot mark, a small file that records the state of the data file.
    """
    mark = BootMark.read(folder)
    if mark is None:
        return Condition.UNKNOWN, NextStart.EMPTY
    if mark.is_of_another_layout:
        return Condition.OTHER_LAYOUT, NextStart.EMPTY
    if damage_of(mark) is not None:
        return Condition.DAMAGED, NextStart.EMPTY
    if mark.state is FileState.CLEAN:
        return Condition.CLEAN, NextStart.WARM
    if not mark.saw_crash:
        return Condition.LEFT_OPEN if _owner(folder) is None else Condition.OPEN, NextStart.WARM
    after = {FileState.COMMIT: NextStart.WARM, FileState.INTERVAL: NextStart.CHECKPOINT}
    return Condition.MACHINE_DOWN, after.get(mark.state, NextStart.EMPTY)


def _owner(folder: Path) -> int | None:
    """Return the pid in the lock file if that process exists and the kernel lists a lock on the file, else None.

    This does not try to take the lock, because that could turn away a process that is just opening the store.
    """
    lock = folder / "owner.lock"
    try:
        pid = int(lock.read_text())
        os.kill(pid, 0)
    except PermissionError:  # another user's process
        pass
    except (OSError, ValueError):
        return None
    there = lock.stat()
    major, minor = os.major(there.st_dev), os.minor(there.st_dev)
    # A file system without a device of its own (btrfs) may have another number in /proc/locks than in stat.
    device = f"{major:02x}:{minor:02x}" if major else "00:[0-9a-f]+"
    held = re.search(rf"FLOCK .* {device}:{there.st_ino} ", Path("/proc/locks").read_text())
    return pid if held else None


def _file_bytes(folder: Path) -> int:
    num_blocks = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the owner has replaced or removed it
            num_blocks += file.lstat().st_blocks
    return num_blocks * 512


def _content(folder: Folder) -> Content:
    try:
        lmdb_roots.check(folder.here / DATA)
        os.close(open_private(folder.here / "lock.mdb", os.O_RDWR | os.O_CREAT))  # LMDB would follow a link
        # 0: the owner's map size. *max_readers* is the owner's too, for when this process creates the reader table.
        with lmdb.open(str(folder.here), readonly=True, map_size=0, max_dbs=4, max_readers=256) as env:
            counters = Tables.counters_in(env)
            return Content(
                num_records=counters.num_records,
                stored_bytes=counters.stored_bytes,
                capacity_bytes=counters.capacity_bytes,
                written_bytes_total=counters.written_bytes_total,
                evicted_total=counters.evicted_total,
                namespaces=_namespaces(env),
            )
    except DAMAGE as error:
        raise StoreDamaged(
            f"store {folder.name} is damaged; kvtier check says whether it can be used: {error}"
        ) from error
    except lmdb.Error as error:
        raise OSError(errno.EIO, f"store {folder.name}: {error}") from error


def _namespaces(env: lmdb.Environment) -> tuple[NamespaceUse, ...]:
    """Count the records by namespace, with `_ROWS_PER_LOOK` records in each read transaction."""
    records = env.open_db(b"records", create=False)
    num_records, stored_bytes = Counter[bytes](), Counter[bytes]()
    last = b""
    while True:
        with env.begin() as txn, txn.cursor(db=records) as cursor:
            is_there = cursor.set_range(last) if last else cursor.first()
            if is_there and cursor.key() == last:  # stepped over, because the longest key has no successor to seek
                is_there = cursor.next()
            rows = list(islice(ascending(cursor, last), _ROWS_PER_LOOK)) if is_there else []
        if not rows:
            break
        last = rows[-1][0]
        for key, row in rows:
            num_records[key[:NAMESPACE_BYTES]] += 1
            stored_bytes[key[:NAMESPACE_BYTES]] += RecordRow.unpack(key, row).charged_bytes
    return tuple(NamespaceUse(namespace, num, stored_bytes[namespace]) for namespace, num in num_records.items())
