"""`LmdbFiles`: index and slabs of one folder, kept open; transactions, syncs, and recovery when LMDB fails."""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeVar

import lmdb

from kvtier.store.blob_store import StoreFull
from kvtier.store.durability import Durability
from kvtier.store.lmdb import data_file
from kvtier.store.lmdb.boot_mark import FileState
from kvtier.store.lmdb.change import MOST_EVICTED, MOST_SECOND_CHANCES, REMOVAL_BYTES, Change, NoFreeSlot
from kvtier.store.lmdb.checkpoint import Checkpoint
from kvtier.store.lmdb.data_file import DAMAGE
from kvtier.store.lmdb.index_file import LITTLE_BYTES
from kvtier.store.lmdb.map_users import MapUsers
from kvtier.store.lmdb.open_folder import OpenFolder, open_folder
from kvtier.store.lmdb.tables import Tables
from kvtier.store.slab import Slabs

_RECORDS_WHEN_FULL = 3  # that one change deletes, and passes over, where there is only room for `LITTLE_BYTES`
_HOLES_AT_ONCE = 4096
CHECK_READERS_S = 10.0  # interval of freeing the reader slots of dead processes, which hold back pages

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class LmdbFiles:
    """The open files of a store. One process has them open, and one of its threads changes them at a time.

    Errors of LMDB are raised as OSError. A broken tree also marks the folder, so that the next start is empty; until
    then changes are refused, and reads go on. If LMDB stops because it could not write its root, the index is opened
    again as it was before. In a process forked from this one every call is a ValueError, and `close` does nothing.
    Once the records are within the capacity the caller must call `settle`.
    """

    def __init__(self, opened: OpenFolder, name: Path, interval_s: float, is_upkeep: bool) -> None:
        self.writer = threading.RLock()  # held for a change; taken before, never inside, `_users`
        self.name = name
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
        self._is_tidy = mark is not None and mark.state is FileState.CLEAN
        self._num_crashes = 0 if mark is None else mark.num_crashes
        try:
            with self._lmdb_errors():
                self._mark_open()
        except BaseException:
            self._release_checkpoint()
            raise

    def settle(self) -> None:
        """Bring the files, whose records are within the capacity, to their right size, and start taking checkpoints."""
        self._tidy_up()
        with self.reading() as txn:
            counters = self.tables.counters(txn)
        if counters.capacity_bytes != self.capacity_bytes:
            with self.changing(removal_bytes=LITTLE_BYTES) as change:
                change.counters.capacity_bytes = self.capacity_bytes
        self.give_back(data_file.slab_bytes(self.capacity_bytes))
        if self.tables.file.taken_bytes() > data_file.index_bytes(self.capacity_bytes) + data_file.BESIDES_BYTES:
            self._compact()
        if self._checkpoint is not None:
            threading.Thread(target=self._take_checkpoints, name="kvtier-checkpoint", daemon=True).start()

    def give_back(self, limit_bytes: int) -> None:
        """Give disk space of free slots back, in several changes, until all slots take *limit_bytes* at most."""
        with self.reading() as txn:
            if self.tables.counters(txn).slab_bytes <= limit_bytes:
                return
        self._reclaim()

        def give_back_some(change: Change, most: int) -> int:
            slots = change.give_back(limit_bytes, most)
            self.slabs.punch(*slots)
            return len(slots)

        while self.remove(give_back_some):
            pass

    def close(self) -> None:
        """Sync and unmap, once all calls under way have ended. A second call does nothing."""
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
    def tables(self) -> Tables:
        """The tables of the index. They are another object after the index was opened again."""
        return self._opened.tables

    @property
    def slabs(self) -> Slabs:
        return self._opened.slabs

    @property
    def capacity_bytes(self) -> int:
        return self._opened.capacity_bytes

    @property
    def here(self) -> Path:
        """A path to the open folder, whatever its name leads to now."""
        return self._opened.here

    @property
    def is_lost(self) -> bool:
        """Whether the index is damaged and marked so: the process should end, as the next start is empty and works."""
        return self._damage is not None and not self._is_upkeep

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the map open inside the block: `close` waits for its end. Never nest two. ValueError after `close`."""
        self._refuse_forked()
        self._recover()
        with self._users, self._lmdb_errors():
            yield

    @contextmanager
    def reading(self) -> "Iterator[lmdb.Transaction[bytes]]":
        """A read transaction. Keep it short: pages freed since it began cannot be reused before it ends."""
        with self.using(), self.tables.env.begin() as txn:
            yield txn

    @contextmanager
    def changing(self, added_bytes: int = 0, removal_bytes: int = REMOVAL_BYTES) -> Iterator[Change]:
        """A change that may need new pages: *added_bytes* for the records that it is given, and *removal_bytes* for
        evictions, second chances and holes beside them. It is committed at the block's end, and undone by any
        exception.
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
                self.slabs.written.clear()
                try:
                    with self.tables.env.begin(write=True) as txn:
                        num_chances = MOST_SECOND_CHANCES if removal_bytes > LITTLE_BYTES else _RECORDS_WHEN_FULL
                        change = Change(self.tables, txn, self._synced_change, num_chances)
                        yield change
                        change.write_accounts()
                except BaseException as error:
                    self._undo_writes()
                    # LMDB asks for as many pages as a row claims, and a damaged one may claim any number.
                    if isinstance(error, lmdb.MapFullError) and not self.tables.file.is_nearly_full(
                        added_bytes + removal_bytes
                    ):
                        raise lmdb.CorruptedError("its map is said to be full, but has room for the change") from error
                    raise

    def change(self, act: Callable[[Change], _T], new_bytes: int) -> _T:
        """Run *act*, which may need *new_bytes* of new pages, as one change that leaves enough pages for a deletion.

        Near the end of the map the change takes these pages to try, as LMDB does not say how many are free. `StoreFull`
        if there are too few.
        """
        try:
            return self._change_at_once(act, new_bytes)
        except StoreFull:
            self._reclaim()
            return self._change_at_once(act, new_bytes)

    def remove(self, act: Callable[[Change, int], _T]) -> _T:
        """Run *act*, which deletes at most the given number of records, as one change; few if the disk is full."""
        try:
            with self.changing() as change:
                return act(change, MOST_EVICTED)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        self._reclaim()
        with self.changing(removal_bytes=LITTLE_BYTES) as change:
            return act(change, _RECORDS_WHEN_FULL)

    def free_pages(self, limit_bytes: int) -> None:
        """Make freed pages and slots usable again.

        Of free slots, whatever their size, so much disk space is given back that a change fits *limit_bytes*.
        """
        self._reclaim()
        self.give_back(max(0, limit_bytes - 2 * data_file.part_bytes(self.capacity_bytes)))

    def sync(self) -> None:
        """Return when every finished change is on the medium, or raise OSError."""
        if self.tables.file.is_doubtful:
            with self.writer, self.using():
                self.tables.file.write_again()
        with self.using():  # not as the writer: changes go on meanwhile
            self.slabs.sync()
            self.tables.file.sync()
        self._take_checkpoint()

    def file_bytes(self) -> int:
        """Bytes that index and slabs take on the medium."""
        return self._opened.taken_bytes()

    def _change_at_once(self, act: Callable[[Change], _T], new_bytes: int) -> _T:
        with self.changing(new_bytes) as change:
            result = act(change)
            if self.tables.file.is_nearly_full(new_bytes):
                change.leave_spare_pages()
            return result

    def _mark_open(self) -> None:
        """Sync the files, if the durability level asks for it, and mark the folder as open.

        This comes before the first change: until here the old mark is true, and the last checkpoint whole.
        """
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
        """Sync the open files, and mark the folder with the state that they are left in."""
        if not self._opened.is_index_open:  # it could not be opened again: it stays as it was, not synced
            return
        with self._lmdb_errors():
            self._opened.sync()
        if self._damage is None and not self._opened.is_removed:
            # Untidy files were synced all the same, which is what COMMIT stands for.
            self._opened.mark(FileState.CLEAN if self._is_tidy else FileState.COMMIT)

    def _tidy_up(self) -> None:
        """Give back disk space of slots that no committed change allocated.

        A process that was killed had written to them, or the index went back to a checkpoint before their change.
        """
        if self._is_tidy:
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
            _log.warning("store %s: takes more room than it should until it is opened again: %s", self.name, error)

    def _undo_writes(self) -> None:
        """Give back disk space of slots that a failed change has written to and not allocated."""
        if not self.slabs.written:
            return
        try:
            with self.tables.env.begin() as txn:
                self.slabs.punch(*self.tables.unallocated(txn, self.slabs.written))
        except (lmdb.Error, OSError):
            self._is_tidy = False

    def _compact(self) -> None:
        """Copy the index to a file without free pages. No change happens meanwhile, so CLEAN is true at every level."""
        with self.writer, self._users.kept_out(), self._lmdb_errors():
            self._opened.sync()
            self._opened.mark(FileState.CLEAN)
            self._release_checkpoint()
            self._opened.compact_index()
            self._mark_open()

    def _reclaim(self) -> None:
        """Make usable again what a dead reader, the last checkpoint or the last change holds back: pages and slots."""
        with self.writer, self.using():
            self._clear_stale_readers()
        self._take_checkpoint()
        with self.changing(removal_bytes=LITTLE_BYTES):
            pass

    def _clear_stale_readers(self) -> None:
        self._readers_checked_at = time.monotonic()
        self.tables.env.reader_check()

    def _take_checkpoint(self) -> None:
        if self._checkpoint is not None:
            with self.writer, self.using():
                self._checkpoint_now()

    def _checkpoint_now(self) -> None:
        assert self._checkpoint is not None, "this level takes none"
        self._opened.sync()
        self._checkpoint.take()

    @property
    def _synced_change(self) -> int | None:
        """The last change that a checkpoint has; None at a level that takes none."""
        return None if self._checkpoint is None else self._checkpoint.last_change

    def _release_checkpoint(self) -> None:
        """Let pages of the last checkpoint be used again. No change may happen before the next checkpoint."""
        if self._checkpoint is not None:
            self._checkpoint.close()

    def _take_checkpoints(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self.sync()
            except ValueError:  # closed
                return
            except OSError as error:
                _log.warning("store %s: no checkpoint, the one before stays: %s", self.name, error)

    @contextmanager
    def _lmdb_errors(self) -> Iterator[None]:
        """Raise errors of LMDB as OSError. A broken tree also marks the folder, so that the next start is empty."""
        try:
            yield
        except NoFreeSlot as error:
            why = "no slot of this size is free; raise capacity_bytes, or use blocks of one size"
            raise StoreFull(errno.ENOSPC, f"store {self.name}: {why}") from error
        except lmdb.MapFullError as error:
            raise StoreFull(errno.ENOSPC, f"store {self.name}: the index is full; raise capacity_bytes") from error
        except lmdb.Error as error:
            if self._is_dead():
                self._has_panicked = True
            if isinstance(error, DAMAGE) and self._damage is None:
                try:
                    if not self._is_upkeep:
                        _log.warning("store %s is damaged, the next start is empty: %s", self.name, error)
                        self._opened.mark(FileState.DAMAGED)
                finally:  # not before: a thread that sees `is_lost` ends the process, marked or not
                    self._damage = error
            raise OSError(errno.EIO, f"store {self.name}: {error}") from error

    def _is_dead(self) -> bool:
        """Whether LMDB refuses every call in this environment, since it could not write its root."""
        try:
            self.tables.env.begin().abort()
        except lmdb.PanicError:
            return True
        except lmdb.Error:
            pass
        return False

    def _recover(self) -> None:
        """Open the index again, as it was before, if LMDB could not write its root. OSError if that fails still."""
        if not self._has_panicked or self._users.is_closed:
            return
        with self.writer, self._users.kept_out():
            if not self._has_panicked:
                return
            self._release_checkpoint()
            with self._lmdb_errors():
                self._opened.reopen_index()
                self._mark_open()
            self._has_panicked = False
        self._tidy_up()

    def _refuse_forked(self) -> None:
        if os.getpid() != self._pid:
            raise ValueError(f"store {self.name}: belongs to process {self._pid}, from which this one was forked")


def open_files(
    folder: Path, capacity_bytes: int | None, durability: Durability, interval_s: float, owner: int | None
) -> LmdbFiles:
    """Open the files of the store in *folder*; *interval_s* is the time between checkpoints.

    *capacity_bytes* None stands for the capacity with which the folder was last opened. Commands that look after a
    store open it so: OSError if there is no store, or a broken one, which stays as it is and is not marked.
    """
    opened = open_folder(folder, capacity_bytes, durability, owner)
    try:
        return LmdbFiles(opened, folder, interval_s, is_upkeep=capacity_bytes is None)
    except BaseException:
        opened.close()
        raise
