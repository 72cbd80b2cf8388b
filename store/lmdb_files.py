"""Index and slabs of one folder, kept open: transactions, syncs, and what to do when LMDB gives up."""

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import lmdb

from kvtier.store import data_file
from kvtier.store.blob_store import StoreFull
from kvtier.store.boot_mark import BootMark, FileState, current_boot_id
from kvtier.store.checkpoint import Checkpoint, forget
from kvtier.store.data_file import DAMAGE, NONSENSE
from kvtier.store.durability import Durability
from kvtier.store.lmdb_change import REMOVAL_BYTES, Change
from kvtier.store.lmdb_tables import LITTLE_BYTES
from kvtier.store.owner_lock import OwnerLock
from kvtier.store.slab import Slabs

_RECORDS_PER_CHANGE = 512  # of a deletion: up to 3 index pages each, 6 MiB
_RECORDS_WHEN_FULL = 8  # of a deletion for which there is no more room than `LITTLE_BYTES`
_CHECK_READERS_S = 10.0  # how often slots of readers in dead processes are freed: they hold back pages

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class LmdbFiles:
    """One process has a folder open (`StoreInUse` otherwise), and of its threads one changes something at a time.

    Errors of LMDB are OSError. A broken tree also marks the folder, so that the next start is empty. If LMDB gives up
    because it could not write its root, the index is opened again as it was before.
    *capacity_bytes* None is the one with which the folder was last opened; OSError if no store is there.
    Once the folder is within its capacity the caller must `settle`.
    """

    def __init__(
        self, folder: Path, capacity_bytes: int | None, durability: Durability, interval_s: float, owner: int | None
    ) -> None:
        self.writer = threading.RLock()  # held for a change; taken before, never inside, `_gate`
        self._folder = folder
        self._durability = durability
        self._interval_s = interval_s
        self._gate = threading.Condition()  # guards the four below
        self._num_users = 0
        self._is_damaged = False
        self._has_panicked = False
        self._closed = False
        self._readers_checked_at = time.monotonic()
        self._checkpoint: Checkpoint | None = None
        self._synced_change: int | None = None  # up to which a checkpoint was taken
        self._closing = threading.Event()

        if capacity_bytes is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._owner_lock = OwnerLock(folder, owner)
        try:
            self.capacity_bytes = data_file.recorded_capacity(folder) if capacity_bytes is None else capacity_bytes
            self.tables = data_file.open_trusted(folder, self.capacity_bytes, durability)
            self.slabs = Slabs(folder)
        except (lmdb.Error, *NONSENSE) as error:
            self._owner_lock.release()
            raise OSError(errno.EIO, f"store {folder}: {error}") from error
        except BaseException:
            self._owner_lock.release()
            raise

    def settle(self) -> None:
        """Bring the files, whose records are within the capacity, to their size and to their level of durability."""
        slab_bytes = data_file.slab_bytes(self.capacity_bytes)
        with self.changing(LITTLE_BYTES) as change:
            change.counters.capacity_bytes = self.capacity_bytes
            is_too_large = change.counters.slab_bytes > slab_bytes
        if is_too_large:
            with self.changing() as change:
                for slot in change.give_back(slab_bytes):
                    self.slabs.punch(slot)
        with self._lmdb_errors():
            if self.tables.index_bytes() > data_file.index_bytes(self.capacity_bytes) + data_file.BESIDES_BYTES:
                self.tables = data_file.compacted(self._folder, self.tables, self.capacity_bytes, self._durability)
            if self._durability is Durability.COMMIT:
                self.slabs.sync()
                self.tables.env.sync(True)
                BootMark(current_boot_id(), FileState.COMMIT).write(self._folder)
            elif self._durability is Durability.INTERVAL:
                self._checkpoint = Checkpoint(self._folder, self.tables.env)
                self._take_checkpoint()
                BootMark(current_boot_id(), FileState.INTERVAL).write(self._folder)
                threading.Thread(target=self._take_checkpoints, name="kvtier-checkpoint", daemon=True).start()

    def close(self) -> None:
        """Sync and unmap, once all that is under way has ended. Once more does nothing."""
        self._closing.set()
        with self.writer:
            with self._gate:
                if self._closed:
                    return
                self._closed = True
                self._gate.wait_for(lambda: self._num_users == 0)  # a read after unmapping would crash
            try:
                with self._lmdb_errors():
                    self.slabs.sync()
                    if self.tables.is_open:  # else it could not be opened again, and is as it was
                        self.tables.env.sync(True)
                if not self._is_damaged:
                    BootMark(current_boot_id(), FileState.CLEAN).write(self._folder)
            finally:
                if self._checkpoint is not None:
                    self._checkpoint.close()
                self.tables.close()
                self.slabs.close()
                self._owner_lock.release()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps the map open meanwhile: `close` waits. Never one inside another. ValueError once it is closed."""
        self._recover()
        with self._gate:
            if self._closed:
                raise ValueError("store is closed")
            self._num_users += 1
        try:
            with self._lmdb_errors():
                yield
        finally:
            with self._gate:
                self._num_users -= 1
                self._gate.notify_all()

    @contextmanager
    def reading(self) -> "Iterator[lmdb.Transaction[bytes]]":
        """A read transaction; keep it short: pages freed since it began cannot be reused before it ends."""
        with self.in_use(), self.tables.env.begin() as txn:
            yield txn

    @contextmanager
    def changing(self, new_bytes: int = REMOVAL_BYTES) -> Iterator[Change]:
        """A change that may need *new_bytes* of pages: committed at the end, undone by any exception."""
        with self.writer:
            if self._closed:
                raise ValueError("store is closed")
            self._recover()
            with self._lmdb_errors():
                if time.monotonic() - self._readers_checked_at > _CHECK_READERS_S:
                    self._clear_stale_readers()
                self.tables.reserve(new_bytes)
                with self.tables.env.begin(write=True) as txn:
                    change = Change(self.tables, txn, self._synced_change)
                    yield change
                    change.write_accounts()

    def change(self, act: Callable[[Change], _T], new_bytes: int) -> _T:
        """Run *act*, which may need *new_bytes* of pages, as one change that leaves pages to delete with.

        Near the end of the map it is tried out, as LMDB does not say how many pages are free. `StoreFull`.
        """
        try:
            return self._change_at_once(act, new_bytes)
        except StoreFull:
            self.free_pages()
            return self._change_at_once(act, new_bytes)

    def remove(self, act: Callable[[Change, int], _T]) -> _T:
        """Run *act*, which removes so many records at most, as one change; of few, if map or medium are full."""
        try:
            with self.changing() as change:
                return act(change, _RECORDS_PER_CHANGE)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        self.free_pages()
        with self.changing(LITTLE_BYTES) as change:
            return act(change, _RECORDS_WHEN_FULL)

    def free_pages(self) -> None:
        """Let be used again what is free, but held back by a dead reader, the last checkpoint or the last change."""
        with self.writer, self.in_use():
            self._clear_stale_readers()
        self._take_checkpoint()
        with self.changing(LITTLE_BYTES):
            pass

    def sync(self) -> None:
        """What has been changed so far is on the medium on return, or OSError."""
        with self.in_use():  # not as the writer: others may go on writing meanwhile
            self.slabs.sync()
            self.tables.env.sync(True)
        self._take_checkpoint()

    def file_bytes(self) -> int:
        """What index and slabs take on the medium."""
        return self.tables.index_bytes() + self.slabs.file_bytes()

    def _change_at_once(self, act: Callable[[Change], _T], new_bytes: int) -> _T:
        with self.changing(new_bytes + REMOVAL_BYTES) as change:
            result = act(change)
            if self.tables.is_nearly_full(new_bytes):
                change.leave_spare_pages()
            return result

    def _clear_stale_readers(self) -> None:
        self._readers_checked_at = time.monotonic()
        self.tables.env.reader_check()

    def _take_checkpoint(self) -> None:
        if self._checkpoint is not None:
            with self.writer, self.in_use():
                self.slabs.sync()
                self._checkpoint.take()
                with self.tables.env.begin() as txn:
                    self._synced_change = self.tables.counters(txn).num_changes

    def _take_checkpoints(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self.sync()
            except ValueError:  # closed
                return
            except OSError as error:
                _log.warning("store %s: no checkpoint, the one before stays: %s", self._folder, error)

    @contextmanager
    def _lmdb_errors(self) -> Iterator[None]:
        """LMDB's errors as OSError; a broken tree also marks the file, so that the next start is empty."""
        try:
            yield
        except lmdb.MapFullError as error:
            raise StoreFull(
                errno.ENOSPC, f"store {self._folder}: map full; raise capacity_bytes or use blocks of one size"
            ) from error
        except (lmdb.Error, *NONSENSE) as error:
            if self._is_dead():
                self._has_panicked = True
            if isinstance(error, (*DAMAGE, *NONSENSE)) and not self._is_damaged:
                self._is_damaged = True
                _log.warning("store %s is damaged, the next start is empty: %s", self._folder, error)
                BootMark(current_boot_id(), FileState.DAMAGED).write(self._folder)
            raise OSError(errno.EIO, f"store {self._folder}: {error}") from error

    def _is_dead(self) -> bool:
        """Whether LMDB does nothing more in this environment: it could not write its root."""
        try:
            self.tables.env.begin().abort()
        except lmdb.PanicError:
            return True
        except lmdb.Error:
            pass
        return False

    def _recover(self) -> None:
        """Open the index again if LMDB gave it up, as it was before; OSError if that is not possible yet."""
        if not self._has_panicked or self._closed:
            return
        with self.writer, self._gate:
            self._gate.wait_for(lambda: self._num_users == 0)
            if not self._has_panicked:
                return
            if self._checkpoint is not None:  # its pages are nobody's as soon as its reader is gone
                forget(self._folder)
                self._synced_change = None
                self._checkpoint.close()
            self.tables.close()
            with self._lmdb_errors():
                self.tables = data_file.reopened(self._folder, self.capacity_bytes, self._durability)
            self._has_panicked = False
            if self._checkpoint is not None:
                self._checkpoint = Checkpoint(self._folder, self.tables.env)
        self._take_checkpoint()
