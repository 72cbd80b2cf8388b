"""A store in one LMDB file: the disk tier of one process."""

import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Self, TypeVar

import lmdb

from kvtier.store.blob_store import Blob, StoreFull, StoreStatistics
from kvtier.store.boot_mark import BootMark, current_boot_id, reason_to_distrust, sync_folder
from kvtier.store.codec import NO_CODEC, Codec
from kvtier.store.lmdb_tables import Change, Tables
from kvtier.store.owner_lock import OwnerLock
from kvtier.store.record import Fault
from kvtier.store.seal import charged_bytes, fault_of, refuse_oversized, seal, unseal

PART_BYTES = 32 << 20  # one transaction of `put_many`; bounds how much of the map waits to be reused
_HEADROOM_BYTES = 6 * PART_BYTES  # of the map; see `_map_bytes`
_RECORDS_PER_CHANGE = 512  # of a deletion: up to 3 index pages each, 6 MiB
_RECORDS_WHEN_FULL = 8  # of a deletion that must not need more pages than a change leaves free
_PAGE_BYTES = 4096
# The tree itself is broken, not one payload; a file like this is not opened again. (Bad transaction:
# what LMDB says when the root of a sub-database is broken. Any other error ends our transactions.)
_DAMAGE = (
    lmdb.BadTxnError,
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class _Rehearsed(Exception):
    """Ends a change that was only tried."""


class LmdbStore:
    """See `BlobStore`. One process owns *folder* (`StoreInUse` otherwise); opening takes the same time at any size.

    Payload, index, recency and accounting change in one transaction, so a process killed at any
    point leaves a whole store. A crash of the machine does not: the next start is empty. So is the
    start after a broken tree was met; until then changes raise and reads are `Fault.IO_ERROR`.
    Bytes are copied out of the map inside short read transactions; no view of it leaves this file.
    The file keeps the size it had when the capacity is lowered. A medium that fails to read a mapped
    page ends the process with SIGBUS, as it does with every program that maps files.
    """

    def __init__(self, folder: Path, capacity_bytes: int, codec: Codec = NO_CODEC) -> None:
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._codec = codec
        self._writer = threading.RLock()  # held for a change; taken before, never inside, `_gate`
        self._gate = threading.Condition()  # guards the five below
        self._num_readers = 0
        self._read_bytes_total = 0
        self._faults: Counter[Fault] = Counter()
        self._is_damaged = False
        self._closed = False

        folder.mkdir(parents=True, exist_ok=True)
        self._owner_lock = OwnerLock(folder)
        try:
            self._tables = _open_trusted(folder, _map_bytes(folder, capacity_bytes))
        except BaseException:
            self._owner_lock.release()
            raise
        try:
            self._evict_to(capacity_bytes)
        except BaseException:
            self.close()
            raise

    def contains(self, key: bytes) -> bool:
        with self._reading() as txn:
            return txn.get(key, db=self._tables.records) is not None

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        refuse_oversized(blobs, self._capacity_bytes)
        evicted: dict[bytes, None] = {}
        for part in _parts(blobs):
            try:
                gone = self._put_part(part)
            except StoreFull as error:
                error.evicted = list(evicted | dict.fromkeys(error.evicted))
                raise
            for blob in part:  # evicted by an earlier part, now back
                evicted.pop(blob.key, None)
            evicted.update(dict.fromkeys(gone))
        return list(evicted)

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        return [self._read(key, out) for key, out in zip(keys, outs, strict=True)]

    def touch(self, keys: Sequence[bytes]) -> None:
        def touch_all(change: Change) -> None:
            for key in keys:
                change.touch(key)

        self._change(touch_all, 3 * _PAGE_BYTES * len(keys))

    def delete(self, keys: Sequence[bytes]) -> int:
        num_deleted, at_once, left = 0, _RECORDS_PER_CHANGE, list(keys)
        while left:
            try:
                with self._changing() as change:
                    num_deleted += sum(change.forget(key) for key in left[:at_once])
            except StoreFull:
                if at_once == _RECORDS_WHEN_FULL:
                    raise
                at_once = _RECORDS_WHEN_FULL
                continue
            del left[:at_once]
        return num_deleted

    def keys(self) -> Iterator[bytes]:
        with self._writer, self._reading() as txn:  # nothing is written, so the reader holds back no pages
            return iter([bytes(key) for key in txn.cursor(db=self._tables.order).iternext(keys=False)])

    def verify(self) -> Iterator[tuple[bytes, Fault | None]]:
        for key in self.keys():
            with self._reading() as txn:
                stored = self._tables.stored(txn, key)
                fault = None if stored is None else fault_of(key, *stored)
            if stored is not None:
                yield key, fault

    def sync(self) -> None:
        with self._in_use(), self._lmdb_errors():  # not as a writer: others may go on writing
            self._tables.env.sync(True)

    def statistics(self) -> StoreStatistics:
        with self._reading() as txn:
            counters = self._tables.counters(txn)
        with self._gate:
            return StoreStatistics(
                num_records=counters.num_records,
                stored_bytes=counters.stored_bytes,
                capacity_bytes=self._capacity_bytes,
                written_bytes_total=counters.written_bytes_total,
                read_bytes_total=self._read_bytes_total,
                evicted_total=counters.evicted_total,
                faults=MappingProxyType(dict(self._faults)),
            )

    def check(self) -> None:
        with self._writer, self._in_use(), self._lmdb_errors(), self._tables.env.begin() as txn:
            self._tables.check(txn)
            stored_bytes = self._tables.counters(txn).stored_bytes
        assert stored_bytes <= self._capacity_bytes, f"{stored_bytes} bytes exceed {self._capacity_bytes}"

    def close(self) -> None:
        with self._writer:
            with self._gate:
                if self._closed:
                    return
                self._closed = True
                self._gate.wait_for(lambda: self._num_readers == 0)  # a read after unmapping would crash
            try:
                with self._lmdb_errors():
                    self._tables.env.sync(True)
                if not self._is_damaged:
                    BootMark(current_boot_id(), is_clean=True).write(self._folder)
            finally:
                self._tables.close()
                self._owner_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keeps the map open meanwhile: `close` waits."""
        with self._gate:
            if self._closed:
                raise ValueError("store is closed")
            self._num_readers += 1
        try:
            yield
        finally:
            with self._gate:
                self._num_readers -= 1
                self._gate.notify_all()

    @contextmanager
    def _reading(self) -> "Iterator[lmdb.Transaction[memoryview]]":
        """A read transaction; keep it short: pages freed since it began cannot be reused before it ends."""
        with self._in_use(), self._lmdb_errors(), self._tables.env.begin(buffers=True) as txn:
            yield txn

    @contextmanager
    def _changing(self, new_bytes: int = 0) -> Iterator[Change]:
        """A change that may need *new_bytes* of pages: committed at the end, undone by any exception."""
        with self._writer:
            if self._closed:
                raise ValueError("store is closed")
            self._tables.reserve(new_bytes)
            with self._lmdb_errors(), self._tables.env.begin(write=True) as txn:
                change = Change(self._tables, txn)
                yield change
                change.write_ledger()

    def _change(self, act: Callable[[Change], _T], new_bytes: int) -> _T:
        """Run *act*, which may need *new_bytes* of pages, as one change that leaves pages to delete with.

        A deletion needs pages of its own: a map filled to the last page could never be emptied again.
        Near the end of the map a rehearsal finds out, as LMDB does not say how many pages are free.
        """
        with self._writer:
            if not self._closed and self._tables.is_nearly_full(new_bytes):
                try:
                    with self._changing(new_bytes) as change:
                        act(change)
                        change.take_spare_pages()
                        raise _Rehearsed
                except _Rehearsed:
                    pass
            with self._changing(new_bytes) as change:
                return act(change)

    @contextmanager
    def _lmdb_errors(self) -> Iterator[None]:
        """LMDB's errors as OSError; a broken tree also marks the file, so that the next start is empty."""
        try:
            yield
        except lmdb.MapFullError as error:
            raise StoreFull(
                errno.ENOSPC, f"store {self._folder}: map full; raise capacity_bytes or use blocks of one size"
            ) from error
        except lmdb.Error as error:
            if isinstance(error, _DAMAGE) and not self._is_damaged:
                self._is_damaged = True
                _log.warning("store %s is damaged, the next start is empty: %s", self._folder, error)
                BootMark("damaged", is_clean=False).write(self._folder)
            raise OSError(errno.EIO, f"store {self._folder}: {error}") from error

    def _put_part(self, part: Sequence[Blob]) -> list[bytes]:
        try:
            return self._put_at_once(part)
        except StoreFull:
            gone = self._make_room(2 * _charged_bytes(part))
            again = {blob.key for blob in part}
            try:
                return [key for key in gone if key not in again] + self._put_at_once(part)
            except StoreFull as error:
                error.evicted = gone
                raise

    def _put_at_once(self, part: Sequence[Blob]) -> list[bytes]:
        def put(change: Change) -> list[bytes]:
            for blob in part:
                if not change.touch(blob.key):
                    change.add(seal(blob, self._codec))
            # Not before adding: LMDB reuses pages freed here in a later transaction only.
            return change.evict(self._capacity_bytes, change.counters.num_records)

        # Small blocks dirty up to 3 index pages each way, as much as they are charged.
        return self._change(put, 3 * _charged_bytes(part))

    def _make_room(self, num_bytes: int) -> list[bytes]:
        """Evict *num_bytes* more than the capacity asks for; the pages are free to use on return."""
        gone = self._evict_to(max(0, self.statistics().stored_bytes - num_bytes), _RECORDS_WHEN_FULL)
        with self._changing():
            pass  # pages become reusable one transaction after the one that freed them
        return gone

    def _evict_to(self, limit_bytes: int, records_per_change: int = _RECORDS_PER_CHANGE) -> list[bytes]:
        evicted: list[bytes] = []
        while self.statistics().stored_bytes > limit_bytes:
            try:
                with self._changing() as change:
                    gone = change.evict(limit_bytes, records_per_change)
            except StoreFull as error:
                if records_per_change == _RECORDS_WHEN_FULL:
                    error.evicted = evicted
                    raise
                records_per_change = _RECORDS_WHEN_FULL
                continue
            if not gone:
                break  # the ledger is wrong; `check` says so, and this must not spin
            evicted += gone
        return evicted

    def _read(self, key: bytes, out: memoryview) -> bytes | Fault:
        result = self._read_once(key, out)
        if isinstance(result, Fault) and result not in (Fault.MISSING, Fault.IO_ERROR):
            result = self._judge(key, out)
        with self._gate:
            if not isinstance(result, Fault):
                self._read_bytes_total += out.nbytes
            elif result is not Fault.MISSING:
                self._faults[result] += 1
        return result

    def _read_once(self, key: bytes, out: memoryview) -> bytes | Fault:
        try:
            with self._reading() as txn:
                stored = self._tables.stored(txn, key)
                return Fault.MISSING if stored is None else unseal(key, *stored, out)
        except OSError:
            return Fault.IO_ERROR

    def _judge(self, key: bytes, out: memoryview) -> bytes | Fault:
        """Read *key*, found bad, once more with writers kept out, and delete it if it still is.

        Between the two it may have been replaced by a good record, which must stay.
        """
        with self._writer:
            result = self._read_once(key, out)
            if isinstance(result, Fault) and result not in (Fault.MISSING, Fault.IO_ERROR):
                try:
                    self.delete([key])
                except OSError as error:
                    _log.warning("store %s: cannot delete a bad record: %s", self._folder, error)
            return result


def _map_bytes(folder: Path, capacity_bytes: int) -> int:
    """Size of the map: what churn at full capacity needs beyond it, and no less than a file that is there.

    Measured over 8 to 60 turnovers in mixed sizes (64 KiB to 4 MiB), touches and a reader: capacities of
    64 / 512 / 2048 MiB grew by 135 / 182 / 347 MiB; blocks of one size by 34 MiB, one part, at each.
    """
    data = folder / "data.mdb"
    present_bytes = data.stat().st_size if data.exists() else 0
    wanted = capacity_bytes * 5 // 4 + _HEADROOM_BYTES
    return max(-(-wanted // _PAGE_BYTES) * _PAGE_BYTES, present_bytes)


def _open_trusted(folder: Path, map_bytes: int) -> Tables:
    """The tables in *folder*, empty ones if those there cannot be trusted."""
    reason = reason_to_distrust(folder)
    if reason is not None and (folder / "data.mdb").exists():
        _start_empty(folder, reason)
    BootMark(current_boot_id(), is_clean=False).write(folder)
    try:
        try:
            return Tables(folder, map_bytes)
        except _DAMAGE as error:
            _start_empty(folder, str(error))
            return Tables(folder, map_bytes)
    except lmdb.Error as error:
        raise OSError(errno.EIO, f"store {folder}: {error}") from error


def _start_empty(folder: Path, reason: str) -> None:
    _log.warning("store %s starts empty: %s", folder, reason)
    for name in ("data.mdb", "lock.mdb"):
        (folder / name).unlink(missing_ok=True)
    sync_folder(folder)


def _charged_bytes(blobs: Sequence[Blob]) -> int:
    return sum(charged_bytes(blob.raw.nbytes) for blob in blobs)


def _parts(blobs: Sequence[Blob]) -> Iterator[list[Blob]]:
    """Runs of *blobs* of at most PART_BYTES, or of one blob."""
    part: list[Blob] = []
    part_bytes = 0
    for blob in blobs:
        blob_bytes = charged_bytes(blob.raw.nbytes)
        if part and part_bytes + blob_bytes > PART_BYTES:
            yield part
            part, part_bytes = [], 0
        part.append(blob)
        part_bytes += blob_bytes
    if part:
        yield part
