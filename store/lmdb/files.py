"""`LmdbFiles`: the open index and slabs of one store, with transactions, syncs, and recovery when LMDB fails."""

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeVar

import lmdb

from kvtier.store.blob_store import StoreFull
from kvtier.store.disk_writes import DiskWrites
from kvtier.store.durability import Durability
from kvtier.store.folder import Folder
from kvtier.store.lmdb import data_file
from kvtier.store.lmdb.boot_mark import BootMark, FileState, current_boot_id
from kvtier.store.lmdb.change import MAX_EVICTED, MAX_SECOND_CHANCES, REMOVAL_BYTES, Change, last_usable
from kvtier.store.lmdb.checkpoint import Checkpoint
from kvtier.store.lmdb.data_file import DAMAGE
from kvtier.store.lmdb.reserved_slots import ReservedSlot, ReservedSlots, new_bytes
from kvtier.store.lmdb.tables import MIN_REMOVAL_BYTES, Tables
from kvtier.store.owner_lock import OwnerLock
from kvtier.store.slab import Slabs

_RECORDS_WHEN_FULL = 3  # records that one change may delete, and marked records that it may skip, if the disk is full
_HOLES_AT_ONCE = 4096  # holes (free slots without disk space) to release at a time
CHECK_READERS_S = 10.0  # interval for removing the entries of dead readers, which prevent the reuse of pages

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class OpenFolder:
    """An open store: folder, lock, index tables and slabs (payload files). Reopening the index replaces *tables*."""

    def __init__(
        self,
        folder: Folder,
        lock: OwnerLock,
        tables: Tables,
        capacity_bytes: int,
        durability: Durability,
        writes: DiskWrites,
    ) -> None:
        self._folder = folder
        self._lock = lock
        self.tables = tables
        self.slabs = Slabs(folder.here, writes)
        self.capacity_bytes = capacity_bytes
        self.durability = durability

    @property
    def here(self) -> Path:
        """Path that leads to the open folder, even if the folder's name leads to another folder now."""
        return self._folder.here

    @property
    def is_index_open(self) -> bool:
        """True if the index is open; False after `reopen_index` has failed."""
        return self.tables.file.is_open

    @property
    def is_removed(self) -> bool:
        """True if the file of the index has been deleted."""
        return self.tables.file.is_removed

    def read_mark(self) -> BootMark | None:
        """Return the boot mark, the record of the state of the files, or None if there is no valid one."""
        return BootMark.read(self.here)

    def mark(self, state: FileState, num_crashes: int = 0) -> None:
        """Write the boot mark, which records that in this boot of the machine the files are in *state*."""
        BootMark(current_boot_id(), state, num_crashes=num_crashes).write(self.here)

    def sync(self) -> None:
        """Block until everything written is on disk. Call this only from the writer. Raises OSError or lmdb.Error."""
        if self.tables.file.sync_failed:
            self.tables.file.rewrite()
        self.slabs.sync()
        self.tables.file.sync()

    def reopen_index(self) -> Tables:
        """Reopen the index in the state before the last change, whose root LMDB could not write.

        Raises OSError or lmdb.Error.
        """
        self.tables.file.close()
        self.tables = data_file.reopen(self._folder, self.capacity_bytes, self.durability)
        return self.tables

    def compact_index(self) -> Tables:
        """Replace the index by a copy without free pages.

        The caller must first call `sync`, and then record with `mark(FileState.CLEAN)` that the files are fully synced.
        """
        self.tables = data_file.compact(self._folder, self.tables, self.capacity_bytes, self.durability)
        return self.tables

    def close(self) -> None:
        """Close the slabs, unmap the index, and release the folder's lock."""
        with ExitStack() as let_go:
            let_go.callback(self._folder.close)
            let_go.callback(self._lock.release)
            let_go.callback(self.tables.file.close)
            let_go.callback(self.slabs.close)


def open_folder(
    path: Path, capacity_bytes: int | None, durability: Durability, writes: DiskWrites, owner: int | None
) -> OpenFolder:
    """Open the store in the folder *path*, which is created if it does not exist.

    If *capacity_bytes* is None, the store keeps the capacity with which it was last opened. Then nothing is created,
    and a missing or broken store raises OSError. Raises `FolderInUse` if another process has the store open.
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
        opened = OpenFolder(folder, lock, tables, capacity_bytes, durability, writes)
        undo.pop_all()
    return opened


class MapUsers:
    """A guard that keeps LMDB's memory map open while threads use it. Threads use it inside `with` blocks on the guard.

    Entering a block after `close` raises ValueError. A thread must not nest two blocks.
    """

    def __init__(self) -> None:
        self._gate = threading.Condition()  # guards the two attributes below
        self._num_users = 0
        self.is_closed = False

    def __enter__(self) -> None:
        with self._gate:
            if self.is_closed:
                raise ValueError("store is closed")
            self._num_users += 1

    def __exit__(self, *error: object) -> None:
        with self._gate:
            self._num_users -= 1
            self._gate.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads from using the map inside a `with` statement.

        Waits for the current users, and lets new users wait. A thread that is using the map must not call this, because
        it would wait for itself.
        """
        with self._gate:
            self._gate.wait_for(lambda: self._num_users == 0)
            yield

    def close(self) -> bool:
        """Refuse further use of the map, and wait until no thread uses it. Returns False if already closed."""
        with self._gate:
            if self.is_closed:
                return False
            self.is_closed = True
            self._gate.wait_for(lambda: self._num_users == 0)
        return True


class LmdbFiles:
    """The open files of a store: index and slabs. One process has them open, and one thread at a time changes them.

    LMDB errors are raised as OSError. If an error means that LMDB's tree is broken, the damage is recorded on disk, and
    the next start begins with an empty store. Until then changes are refused and reads continue. If LMDB could not
    write its meta page at the end of a transaction, the index is reopened in the state before that transaction.

    After opening, the caller must evict the records that exceed the capacity, and then call `settle`. In a process
    forked from this one, `close` does nothing, and every other call raises ValueError.
    """

    def __init__(self, opened: OpenFolder, name: Path, interval_s: float, is_upkeep: bool) -> None:
        self.writer = threading.RLock()  # held for a change; acquired before `_users`, never inside it
        self.name = name
        self.here = opened.here  # leads to the open folder even if its name leads to another one now
        self.tables = opened.tables  # of the index; replaced when the index is reopened
        self.slabs = opened.slabs
        self.capacity_bytes = opened.capacity_bytes
        self._reserved = ReservedSlots()  # guarded by `writer`
        self._opened = opened
        self._interval_s = interval_s
        self._is_upkeep = is_upkeep
        self._pid = os.getpid()
        self._users = MapUsers()
        self._damage: lmdb.Error | None = None
        self._has_panicked = False
        self._readers_checked_at = time.monotonic()
        self._checkpoint: Checkpoint | None = None
        self._closing = threading.Event()
        mark = opened.read_mark()
        # Whether only slots that a committed change has allocated take disk space.
        self._is_tidy = mark is not None and mark.state is FileState.CLEAN
        self._num_crashes = 0 if mark is None else mark.num_crashes
        try:
            with self._lmdb_errors():
                self._mark_open()
        except BaseException:
            self._release_checkpoint()
            raise

    def settle(self) -> None:
        """Adjust the files to the capacity, and start taking checkpoints. The records must fit into the capacity."""
        self._tidy_up()
        with self.reading() as txn:
            counters = self.tables.counters(txn)
        if counters.capacity_bytes != self.capacity_bytes:
            with self.changing(removal_bytes=MIN_REMOVAL_BYTES) as change:
                change.counters.capacity_bytes = self.capacity_bytes
        self.give_back(data_file.slab_bytes(self.capacity_bytes))
        if self.tables.file.taken_bytes() > data_file.index_bytes(self.capacity_bytes) + data_file.OVERHEAD_BYTES:
            self._compact()
        if self._checkpoint is not None:
            threading.Thread(target=self._take_checkpoints, name="kvtier-checkpoint", daemon=True).start()

    def give_back(self, limit_bytes: int) -> None:
        """Release disk space of free slots until all slots take at most *limit_bytes*. Uses several transactions.

        First makes all freed slots reusable, which may take a checkpoint.
        """
        with self.reading() as txn:
            if self.tables.counters(txn).slab_bytes <= limit_bytes:
                return
        self._reclaim()
        self._give_back_now(limit_bytes)

    def close(self) -> None:
        """Sync and close the files once all calls in progress have ended. A second call does nothing."""
        if os.getpid() != self._pid:
            return
        self._closing.set()
        with self.writer:
            if not self._users.close():  # a read after unmapping would crash
                return
            with closing(self._opened):
                try:
                    self._mark_closed()
                finally:
                    self._release_checkpoint()

    @property
    def is_lost(self) -> bool:
        """True if the index was found damaged. The process should then end; the next one starts with an empty store."""
        return self._damage is not None and not self._is_upkeep

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep LMDB's memory map open inside a `with` statement; `close` waits for the end of the statement.

        Raises ValueError after `close`. A thread must not nest two such statements.
        """
        self._refuse_forked()
        self._recover()
        with self._users, self._lmdb_errors():
            yield

    @contextmanager
    def reading(self) -> "Iterator[lmdb.Transaction[bytes]]":
        """Provide a read transaction for a `with` statement.

        Keep the statement short: pages that are freed meanwhile cannot be reused before it ends.
        """
        with self.using(), self.tables.env.begin() as txn:
            yield txn

    @contextmanager
    def changing(self, added_bytes: int = 0, removal_bytes: int = REMOVAL_BYTES) -> Iterator[Change]:
        """Provide a `Change` (write transaction) for a `with` statement, at the end of which it is committed.

        Any exception undoes the change.

        Args:
            added_bytes: Bytes of new LMDB pages that the change may need to add records, or to mark them as recently
                used.
            removal_bytes: Bytes of new LMDB pages that the change may need in addition, to evict records, to skip
                records marked as recently used, and to list free slots as slots without disk space.
        """
        self._refuse_forked()
        with self.writer:
            if self._users.is_closed:
                raise ValueError("store is closed")
            self._recover()
            if self._damage is not None:
                raise OSError(errno.EIO, f"store {self.name} is damaged: {self._damage}") from self._damage
            with self._lmdb_errors():
                if time.monotonic() - self._readers_checked_at > CHECK_READERS_S:
                    self._clear_stale_readers()
                self.tables.file.reserve(added_bytes + removal_bytes)
                try:
                    with self.tables.env.begin(write=True) as txn:
                        num_chances = MAX_SECOND_CHANCES if removal_bytes > MIN_REMOVAL_BYTES else _RECORDS_WHEN_FULL
                        change = Change(self.tables, txn, self._synced_change, num_chances, self._reserved)
                        yield change
                        change.write_accounts()
                except lmdb.MapFullError as error:
                    # LMDB asks for as many pages as a row claims, and a damaged row may claim any number.
                    if not self.tables.file.is_nearly_full(added_bytes + removal_bytes):
                        raise lmdb.CorruptedError("LMDB reports a full map, but the change fits into it") from error
                    raise

    def change(self, act: Callable[[Change], _T], new_bytes: int) -> _T:
        """Run *act* in one write transaction, which may need *new_bytes* of new LMDB pages.

        Enough pages must stay free for a later deletion, which needs new pages itself. Otherwise the transaction is
        undone, freed pages and slots are made reusable, and *act* runs again. Raises `StoreFull` if that does not help.
        """
        try:
            return self._change_at_once(act, new_bytes)
        except StoreFull:
            self._reclaim()
            return self._change_at_once(act, new_bytes)

    def remove(self, act: Callable[[Change, int], _T]) -> _T:
        """Run *act* as one change. It is called with the change and the maximum number of records that it may delete.

        That number is small if the disk is full.
        """
        try:
            with self.changing() as change:
                return act(change, MAX_EVICTED)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        self._reclaim()
        with self.changing(removal_bytes=MIN_REMOVAL_BYTES) as change:
            return act(change, _RECORDS_WHEN_FULL)

    def reserve(self, sizes: Sequence[int], limit_bytes: int) -> list[ReservedSlot]:
        """Reserve a slot for each of *sizes*. A put can write to these slots before a change gives them to records.

        All slots together may take at most *limit_bytes* on disk. If there is no room for new slots, the disk space of
        free slots of other sizes is released. Raises `StoreFull` if that does not help. When the put ends, with or
        without success, the caller must pass all these slots to `release`.
        """
        self._refuse_forked()
        with self.writer:
            for release_space in (self._give_back_now, self.give_back, None):
                found = self._find_slots(sizes)
                if self._is_room_for(found, limit_bytes):
                    self._reserved.add(found)
                    return found
                if release_space is not None:
                    reused = [reserved for reserved in found if reserved.freed_by is not None]
                    self._reserved.add(reused)  # their disk space must not be released
                    try:
                        release_space(limit_bytes - new_bytes(found))
                    finally:
                        self._reserved.drop(reused)
        why = "no slot of this size is free, and the files may not grow"
        why += "; free space on the disk, raise the capacity, or use blocks of one size"
        raise StoreFull(errno.ENOSPC, f"store {self.name}: {why}")

    def slot_bytes(self) -> int:
        """Return how much disk space all slots take, with those that puts are writing to. The caller holds `writer`."""
        with self.reading() as txn:
            return self.tables.counters(txn).slab_bytes + self._reserved.new_bytes

    def on_taken(self, slots: Sequence[ReservedSlot]) -> None:
        """End the reservation of *slots* after a change has given them to records. The caller holds `writer`."""
        self._reserved.drop(slots)

    def release(self, slots: Sequence[ReservedSlot]) -> None:
        """End the reservation of those *slots* that no record got.

        The disk space of those among them that took none before is released.

        No thread may write to the slots any more.
        """
        with self.writer:
            left = [slot for slot, freed_by in self._reserved.drop(slots) if freed_by is None]
            if not left:
                return
            try:
                with self.reading() as txn:
                    self.slabs.punch(*self.tables.unallocated(txn, left))
            except (OSError, ValueError):  # ValueError: closed
                self._is_tidy = False

    def free_pages(self, limit_bytes: int) -> None:
        """Make freed index pages and slots usable again, and release disk space of free slots.

        Afterwards there is room for the slots of the next write transaction: with them, all slots together take at most
        *limit_bytes* of disk space.
        """
        self._reclaim()
        self.give_back(max(0, limit_bytes - 2 * data_file.part_bytes(self.capacity_bytes)))

    def sync(self) -> None:
        """Block until every completed change is on disk. Raises OSError if that fails."""
        if self.tables.file.sync_failed:
            with self.writer, self.using():
                self.tables.file.rewrite()
        with self.using():  # without the writer's lock, so that changes continue meanwhile
            self.slabs.sync()
            self.tables.file.sync()
        self._take_checkpoint()

    def file_bytes(self) -> int:
        """Return the disk space that index and slabs take."""
        return self.tables.file.taken_bytes() + self.slabs.file_bytes()

    @property
    def _synced_change(self) -> int | None:
        """Number of the last change in the last checkpoint, or None for a store without checkpoints."""
        return None if self._checkpoint is None else self._checkpoint.last_change

    def _find_slots(self, sizes: Sequence[int]) -> list[ReservedSlot]:
        """Return a slot for each of *sizes* that no record and no put has."""
        with self.reading() as txn:
            usable_before = last_usable(self.tables.counters(txn), self._synced_change)
            found = {
                num_bytes: iter(self._reserved.find(self.tables, txn, num_bytes, num_slots, usable_before))
                for num_bytes, num_slots in Counter(sizes).items()
            }
        if len(found) == 1:
            return list(*found.values())
        return [next(found[num_bytes]) for num_bytes in sizes]

    def _is_room_for(self, found: Sequence[ReservedSlot], limit_bytes: int) -> bool:
        """Return whether all slots take at most *limit_bytes* on disk after payloads were written to *found*."""
        added_bytes = new_bytes(found)
        return not added_bytes or self.slot_bytes() + added_bytes <= limit_bytes

    def _give_back_now(self, limit_bytes: int) -> None:
        """Do as `give_back`, but leave alone what only a checkpoint makes reusable."""

        def give_back_some(change: Change, limit: int) -> int:
            slots = change.give_back(limit_bytes - self._reserved.new_bytes, limit)
            self.slabs.punch(*slots)
            return len(slots)

        while self.remove(give_back_some):
            pass

    def _change_at_once(self, act: Callable[[Change], _T], new_bytes: int) -> _T:
        with self.changing(new_bytes) as change:
            result = act(change)
            if self.tables.file.is_nearly_full(new_bytes):
                change.check_spare_pages()
            return result

    def _mark_open(self) -> None:
        # This runs before the first change, so after an interruption the old mark and checkpoint are still correct.
        level = self._opened.durability
        if level is Durability.COMMIT:
            self._opened.sync()
        elif level is Durability.INTERVAL:
            self._release_checkpoint()
            self._checkpoint = Checkpoint(self.here, self.tables)
            self._checkpoint_now()
        if self._damage is None:
            self._opened.mark(FileState(level.value), self._num_crashes)

    def _mark_closed(self) -> None:
        if not self._opened.is_index_open:  # the index could not be reopened, so the boot mark still says open
            return
        with self._lmdb_errors():
            self._opened.sync()
        if self._damage is None and not self._opened.is_removed:
            # COMMIT says that the files are synced, but that slots without a committed change may take disk space.
            is_tidy = self._is_tidy and not self._reserved
            self._opened.mark(FileState.CLEAN if is_tidy else FileState.COMMIT)

    def _tidy_up(self) -> None:
        """Release the disk space of slots that no committed change has allocated.

        Such slots exist if a process was killed after it had written to them, or if the index was restored to a
        checkpoint from before the change that allocated them. Does nothing while puts have reserved slots.
        """
        if self._is_tidy or self._reserved:
            return
        try:
            with self.writer, self.reading() as txn:
                self.slabs.cut(self.tables.num_slots(txn))
                if self.slabs.file_bytes() > self.tables.counters(txn).slab_bytes:
                    holes = self.tables.hole_slots(txn)
                    while some := list(islice(holes, _HOLES_AT_ONCE)):
                        self.slabs.punch(*some)
            self._is_tidy = True
        except OSError as error:
            _log.warning(
                "store %s takes too much disk space until it is opened again; unused slots could not be released: %s",
                self.name,
                error,
            )

    def _compact(self) -> None:
        with self.writer, self._users.exclusive(), self._lmdb_errors():
            self._opened.sync()
            self._opened.mark(FileState.CLEAN)  # correct at every durability level, because no change is made meanwhile
            self._release_checkpoint()
            self.tables = self._opened.compact_index()
            self._mark_open()

    def _reclaim(self) -> None:
        """Make all freed pages and slots reusable.

        Dead readers, the last checkpoint and the last change may block the reuse. So this removes the entries of dead
        readers, takes a checkpoint, and makes an empty change.
        """
        with self.writer, self.using():
            self._clear_stale_readers()
        self._take_checkpoint()
        with self.changing(removal_bytes=MIN_REMOVAL_BYTES):
            pass

    def _clear_stale_readers(self) -> None:
        self._readers_checked_at = time.monotonic()
        self.tables.env.reader_check()

    def _take_checkpoint(self) -> None:
        if self._checkpoint is not None:
            with self.writer, self.using():
                self._checkpoint_now()

    def _checkpoint_now(self) -> None:
        assert self._checkpoint is not None, "this durability level takes no checkpoints"
        self._opened.sync()
        self._checkpoint.take()

    def _release_checkpoint(self) -> None:
        # After this, a change of the index could overwrite the last checkpoint, so the next checkpoint must come first.
        if self._checkpoint is not None:
            self._checkpoint.close()

    def _take_checkpoints(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self.sync()
            except ValueError:  # closed
                return
            except OSError as error:
                _log.warning("store %s: the checkpoint failed, but the previous one stays valid: %s", self.name, error)

    @contextmanager
    def _lmdb_errors(self) -> Iterator[None]:
        try:
            yield
        except lmdb.MapFullError as error:
            raise StoreFull(errno.ENOSPC, f"store {self.name}: the index is full; raise capacity_bytes") from error
        except lmdb.Error as error:
            if self._is_dead():
                self._has_panicked = True
            if isinstance(error, DAMAGE) and self._damage is None:
                try:
                    if not self._is_upkeep:
                        _log.warning("store %s is damaged and will start empty next time: %s", self.name, error)
                        self._opened.mark(FileState.DAMAGED)
                finally:  # last, because a thread that sees `is_lost` ends the process, marked or not
                    self._damage = error
            raise OSError(errno.EIO, f"store {self.name}: {error}") from error

    def _is_dead(self) -> bool:
        try:
            self.tables.env.begin().abort()
        except lmdb.PanicError:  # LMDB could not write a meta page, and refuses every call from then on
            return True
        except lmdb.Error:
            pass
        return False

    def _recover(self) -> None:
        """Reopen the index if LMDB could not write the root of the last change. Raises OSError if that fails."""
        if not self._has_panicked or self._users.is_closed:
            return
        with self.writer, self._users.exclusive():
            if not self._has_panicked:
                return
            self._release_checkpoint()
            with self._lmdb_errors():
                self.tables = self._opened.reopen_index()
                self._mark_open()
            self._has_panicked = False
        self._tidy_up()

    def _refuse_forked(self) -> None:
        if os.getpid() != self._pid:
            raise ValueError(
                f"store {self.name} is open in process {self._pid}, from which this one was forked; use it there"
            )


def open_files(
    folder: Path,
    capacity_bytes: int | None,
    durability: Durability,
    interval_s: float,
    writes: DiskWrites,
    owner: int | None,
) -> LmdbFiles:
    """Open the files of the store in *folder*. *interval_s* is the time between checkpoints.

    If *capacity_bytes* is None (for maintenance commands), the store keeps the capacity with which it was last opened.
    Then a missing or broken store raises OSError, and damage that is found later is not recorded on disk.
    """
    opened = open_folder(folder, capacity_bytes, durability, writes, owner)
    try:
        return LmdbFiles(opened, folder, interval_s, is_upkeep=capacity_bytes is None)
    except BaseException:
        opened.close()
        raise
