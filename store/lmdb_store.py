"""A store in one LMDB file: the disk tier of one process."""

import errno
import logging
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Self, TypeVar

import lmdb

from kvtier.store import data_file
from kvtier.store.blob_store import Blob, StoreFull, StoreStatistics
from kvtier.store.boot_mark import BootMark, FileState, current_boot_id
from kvtier.store.checkpoint import Checkpoint, forget
from kvtier.store.cipher import Cipher
from kvtier.store.codec import NO_CODEC, Codec
from kvtier.store.codec_choice import CodecChoice
from kvtier.store.data_file import DAMAGE, NONSENSE, PAGE_BYTES
from kvtier.store.durability import Durability
from kvtier.store.group_commit import GroupCommit
from kvtier.store.lmdb_tables import LITTLE_BYTES, REMOVAL_BYTES, Change
from kvtier.store.owner_lock import OwnerLock
from kvtier.store.record import Fault, is_plain
from kvtier.store.seal import Sealed, charged_bytes, fault_of, open_record, refuse_oversized, seal
from kvtier.store.slab import Slabs, Slot, slot_bytes

NUM_READERS = 4  # threads that share a large read
_SHARE_BYTES = 1 << 20  # of a read that one thread takes at least
_CACHED_SHARE_BYTES = 8 << 20  # if it only copies: handing work over takes as long as copying a megabyte
_READ_BYTES = 4 << 20  # read at a time by one thread, or one block
_INDEX_PAGES = 8  # that one record's change may make new
_RECORDS_PER_CHANGE = 512  # of a deletion: up to 3 index pages each, 6 MiB
_RECORDS_WHEN_FULL = 8  # of a deletion for which there is no more room than `LITTLE_BYTES`
_KEYS_PER_PAGE = 4096
_CHECK_READERS_S = 10.0  # how often slots of readers in dead processes are freed: they hold back pages

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class _StillTooMuch(Exception):
    """One change went through as much of the order as it may, and there is still no room for *new_bytes*."""

    def __init__(self, new_bytes: Mapping[bytes, int], evicted: list[bytes]) -> None:
        super().__init__()
        self.new_bytes = new_bytes
        self.evicted = evicted


class LmdbStore:
    """See `BlobStore`. One process owns *folder* (`StoreInUse` otherwise); opening takes the same time at any size.

    A payload is written to a slot that no record has. Then record, slot, recency and accounting change in one
    transaction, so a process killed at any point leaves a whole store. What a crash of the machine leaves is up to the
    *durability*; *interval_s* is the time between checkpoints.
    *quotas* are bytes by tenant, of which none is exceeded from the first put of that tenant's on.
    *owner* is the pid that others are told, this process's by default.
    The start after a broken tree was met is empty; until then changes raise and reads are `Fault.IO_ERROR`.
    Without *capacity_bytes* it is the one with which the store was last opened; OSError if there is no such store.
    The folder never takes more than `data_file.most_bytes` of the capacity. A medium that fails to read a page of the
    index ends the process with SIGBUS, as with every program that maps files: that is what `StoreProcess` is for.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int | None = None,
        codec: Codec | CodecChoice = NO_CODEC,
        cipher: Cipher | None = None,
        durability: Durability = Durability.PROCESS,
        interval_s: float = 10.0,
        quotas: Mapping[bytes, int] = MappingProxyType({}),
        owner: int | None = None,
    ) -> None:
        self._folder = folder
        self._codec = codec
        self._cipher = cipher
        self._durability = durability
        self._interval_s = interval_s
        self._quotas = quotas
        self._writer = threading.RLock()  # held for a change; taken before, never inside, `_gate`
        self._gate = threading.Condition()  # guards the six below
        self._num_readers = 0
        self._read_bytes_total = 0
        self._faults: Counter[Fault] = Counter()
        self._is_damaged = False
        self._has_panicked = False
        self._closed = False
        self._readers = ThreadPoolExecutor(NUM_READERS, "kvtier-store-read")
        self._syncer = ThreadPoolExecutor(1, "kvtier-store-sync")  # its own: the readers may wait for the writer
        self._readers_checked_at = time.monotonic()
        self._checkpoint: Checkpoint | None = None
        self._synced_change: int | None = None  # up to which a checkpoint was taken
        self._gone: list[bytes] = []  # evicted, and nobody has been told
        self._closing = threading.Event()

        if capacity_bytes is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._owner_lock = OwnerLock(folder, owner)
        try:
            self._capacity_bytes = data_file.recorded_capacity(folder) if capacity_bytes is None else capacity_bytes
            self._tables = data_file.open_trusted(folder, self._capacity_bytes, durability)
            self._slabs = Slabs(folder)
        except (lmdb.Error, *NONSENSE) as error:
            self._owner_lock.release()
            raise OSError(errno.EIO, f"store {folder}: {error}") from error
        except BaseException:
            self._owner_lock.release()
            raise
        self._group = GroupCommit(self._writer, data_file.part_bytes(self._capacity_bytes), self._put_group)
        try:
            self._settle()
        except BaseException:
            self.close()
            raise

    def contains(self, key: bytes) -> bool:
        with self._reading() as txn:
            return txn.get(key, db=self._tables.records) is not None

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        refuse_oversized(blobs, self._capacity_bytes, self._cipher)
        evicted: dict[bytes, None] = {}
        for part in _parts(blobs, data_file.part_bytes(self._capacity_bytes)):
            try:
                gone = self._group.put(part)
            except OSError as error:
                with self._writer:
                    self._gone = self._without_those_back(evicted) + self._gone  # whoever comes next is told
                    if isinstance(error, StoreFull):
                        error.evicted, self._gone = list(dict.fromkeys(self._gone)), []
                raise
            for blob in part:  # evicted by an earlier part, now back
                evicted.pop(blob.key, None)
            evicted.update(dict.fromkeys(gone))
        return list(evicted)

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        pairs = list(zip(keys, outs, strict=True))
        num_bytes = sum(out.nbytes for out in outs)
        least = _CACHED_SHARE_BYTES if pairs and self._seems_cached(keys[len(keys) // 2]) else _SHARE_BYTES
        num_shares = min(NUM_READERS, len(pairs), num_bytes // least)
        if num_shares <= 1:
            return self._read_share(pairs)
        size = -(-len(pairs) // num_shares)
        shares = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        return list(chain.from_iterable(self._readers.map(self._read_share, shares)))

    def touch(self, keys: Sequence[bytes]) -> None:
        def mark_all(change: Change) -> None:
            for key in keys:
                change.mark(key)

        self._change(mark_all, _INDEX_PAGES * PAGE_BYTES * len(keys))

    def delete(self, keys: Sequence[bytes]) -> int:
        num_deleted, left = 0, list(keys)

        def forget_some(change: Change, most: int) -> list[bool]:
            return [change.forget(key) for key in left[:most]]

        while left:
            forgotten = self._remove(forget_some)
            num_deleted += sum(forgotten)
            del left[: len(forgotten)]
        return num_deleted

    def keys(self) -> Iterator[bytes]:
        with self._in_use():
            return self._walk()

    def verify(self) -> Iterator[tuple[bytes, Fault | None]]:
        for key in self.keys():
            found = self.verify_one(key)
            if found is not None:
                yield key, found[1]

    def sync(self) -> None:
        with self._in_use(), self._lmdb_errors():  # not as the writer: others may go on writing meanwhile
            self._slabs.sync()
            self._tables.env.sync(True)
        self._take_checkpoint()

    def statistics(self) -> StoreStatistics:
        with self._reading() as txn:
            counters = self._tables.counters(txn)
            tenants = self._tables.bytes_of_tenants(txn)
            file_bytes = self._tables.index_bytes() + self._slabs.file_bytes()
        with self._gate:
            return StoreStatistics(
                num_records=counters.num_records,
                stored_bytes=counters.stored_bytes,
                capacity_bytes=self._capacity_bytes,
                file_bytes=file_bytes,
                written_bytes_total=counters.written_bytes_total,
                written_lately_bytes=counters.written_lately_bytes,
                read_bytes_total=self._read_bytes_total,
                evicted_total=counters.evicted_total,
                tenants=tenants,
                faults=dict(self._faults),
            )

    def check(self) -> None:
        with self._writer, self._in_use(), self._lmdb_errors(), self._tables.env.begin() as txn:
            self._tables.check(txn)
            stored_bytes = self._tables.counters(txn).stored_bytes
            file_bytes = self._tables.index_bytes() + self._slabs.file_bytes()
        assert stored_bytes <= self._capacity_bytes, f"{stored_bytes} bytes exceed {self._capacity_bytes}"
        most = data_file.most_bytes(self._capacity_bytes)
        assert file_bytes <= most, f"the files take {file_bytes} bytes, more than {most}"

    def close(self) -> None:
        self._closing.set()
        with self._writer:
            with self._gate:
                if self._closed:
                    return
                self._closed = True
                self._gate.wait_for(lambda: self._num_readers == 0)  # a read after unmapping would crash
            self._readers.shutdown()
            self._syncer.shutdown()
            try:
                with self._lmdb_errors():
                    self._slabs.sync()
                    if self._tables.is_open:  # else it could not be opened again, and is as it was
                        self._tables.env.sync(True)
                if not self._is_damaged:
                    BootMark(current_boot_id(), FileState.CLEAN).write(self._folder)
            finally:
                if self._checkpoint is not None:
                    self._checkpoint.close()
                self._tables.close()
                self._slabs.close()
                self._owner_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _walk(self) -> Iterator[bytes]:
        """The keys, newest first, in pages: a long read transaction would hold back the pages freed meanwhile."""
        before = None
        while True:
            with self._in_use(), self._lmdb_errors(), self._tables.env.begin() as txn:
                page = self._tables.keys_before(txn, before, _KEYS_PER_PAGE)
            if not page:
                return
            before = page[-1][0]
            yield from (key for _, key in page)

    def _settle(self) -> None:
        """Bring a file just opened within its capacity, and to its level of durability."""
        self._evict_to(self._capacity_bytes)
        self._gone.clear()
        slab_bytes = data_file.slab_bytes(self._capacity_bytes)
        with self._changing(LITTLE_BYTES) as change:
            change.counters.capacity_bytes = self._capacity_bytes
            is_too_large = change.counters.slab_bytes > slab_bytes
        if is_too_large:
            with self._changing() as change:
                for slot in change.give_back(slab_bytes):
                    self._slabs.punch(slot)
        with self._lmdb_errors():
            if self._tables.index_bytes() > data_file.index_bytes(self._capacity_bytes) + data_file.BESIDES_BYTES:
                self._tables = data_file.compacted(self._folder, self._tables, self._capacity_bytes, self._durability)
            if self._durability is Durability.COMMIT:
                self._slabs.sync()
                self._tables.env.sync(True)
                BootMark(current_boot_id(), FileState.COMMIT).write(self._folder)
            elif self._durability is Durability.INTERVAL:
                self._checkpoint = Checkpoint(self._folder, self._tables.env)
                self._take_checkpoint()
                BootMark(current_boot_id(), FileState.INTERVAL).write(self._folder)
                threading.Thread(target=self._take_checkpoints, name="kvtier-checkpoint", daemon=True).start()

    def _take_checkpoint(self) -> None:
        if self._checkpoint is not None:
            with self._writer, self._in_use(), self._lmdb_errors():
                self._slabs.sync()
                self._checkpoint.take()
                with self._tables.env.begin() as txn:
                    self._synced_change = self._tables.counters(txn).num_changes

    def _take_checkpoints(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self.sync()
            except ValueError:  # closed
                return
            except OSError as error:
                _log.warning("store %s: no checkpoint, the one before stays: %s", self._folder, error)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keeps the map open meanwhile: `close` waits. Never one inside another."""
        self._recover()
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
    def _changing(self, new_bytes: int = REMOVAL_BYTES) -> Iterator[Change]:
        """A change that may need *new_bytes* of pages: committed at the end, undone by any exception."""
        with self._writer:
            if self._closed:
                raise ValueError("store is closed")
            self._recover()
            with self._lmdb_errors():
                if time.monotonic() - self._readers_checked_at > _CHECK_READERS_S:
                    self._clear_stale_readers()
                self._tables.reserve(new_bytes)
                with self._tables.env.begin(write=True) as txn:
                    change = Change(self._tables, txn, self._synced_change)
                    yield change
                    change.write_accounts()

    def _change(self, act: Callable[[Change], _T], new_bytes: int) -> _T:
        """Run *act*, which may need *new_bytes* of pages, as one change that leaves pages to delete with.

        Near the end of the map it is tried out, as LMDB does not say how many pages are free.
        """
        try:
            return self._change_at_once(act, new_bytes)
        except StoreFull:
            self._free_pages()
            return self._change_at_once(act, new_bytes)

    def _change_at_once(self, act: Callable[[Change], _T], new_bytes: int) -> _T:
        with self._changing(new_bytes + REMOVAL_BYTES) as change:
            result = act(change)
            if self._tables.is_nearly_full(new_bytes):
                change.leave_spare_pages()
            return result

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
            self._tables.env.begin().abort()
        except lmdb.PanicError:
            return True
        except lmdb.Error:
            pass
        return False

    def _recover(self) -> None:
        """Open the index again if LMDB gave it up, as it was before; OSError if that is not possible yet."""
        if not self._has_panicked or self._closed:
            return
        with self._writer, self._gate:
            self._gate.wait_for(lambda: self._num_readers == 0)
            if not self._has_panicked:
                return
            if self._checkpoint is not None:  # its pages are nobody's as soon as its reader is gone
                forget(self._folder)
                self._synced_change = None
                self._checkpoint.close()
            self._tables.close()
            with self._lmdb_errors():
                self._tables = data_file.reopened(self._folder, self._capacity_bytes, self._durability)
            self._has_panicked = False
            if self._checkpoint is not None:
                self._checkpoint = Checkpoint(self._folder, self._tables.env)
        self._take_checkpoint()

    def _put_group(self, group: Sequence[Blob]) -> list[bytes]:
        """Store *group*; if there is no room, after making some. All keys evicted that nobody was told of."""
        try:
            self._put_at_once(group)
        except StoreFull:
            self._make_room(2 * _charged_bytes(group))
            self._put_at_once(group)
        gone, self._gone = self._gone, []
        return gone

    def _put_at_once(self, group: Sequence[Blob]) -> None:
        unique = {blob.key: blob for blob in group}.values()
        syncing: list[Future[None]] = []

        def put(change: Change) -> tuple[list[bytes], set[bytes]]:
            new = [blob for blob in unique if not change.mark(blob.key)]
            coming = {blob.key for blob in new}
            for blob in new:
                if blob.parent not in coming:  # nobody is evicted for what continues it
                    change.mark(blob.parent)
            sealed = [seal(blob, self._codec, self._cipher) for blob in new]
            # First, so that new records come behind those that get a second chance for them.
            new_bytes: Counter[bytes] = Counter()
            for blob, one in zip(new, sealed, strict=True):
                new_bytes[blob.tenant] += one.charged_bytes
            evicted = self._evict(change, new_bytes)
            slots = self._write(change, sealed)
            if self._durability is Durability.COMMIT:  # beside the commit: their order does not matter, digests tell
                syncing.append(self._syncer.submit(self._slabs.sync))
            for blob, one, slot in zip(new, sealed, slots, strict=True):
                coming.discard(blob.key)
                change.add(one, blob, slot, coming)
            return evicted + self._evict(change, dict.fromkeys(new_bytes, 0)), {blob.key for blob in new}

        index_bytes = _INDEX_PAGES * PAGE_BYTES * len(group)
        try:
            evicted, new = self._change(put, index_bytes)
        except _StillTooMuch as too_much:
            self._make_way(too_much.new_bytes)
            evicted, new = self._change(put, index_bytes)
        self._gone = [key for key in self._gone if key not in new] + evicted
        try:
            for sync in syncing:
                sync.result()
        except OSError:
            with suppress(OSError):  # else they are there, and may not survive a crash
                self.delete(list(new))
            raise

    def _write(self, change: Change, sealed: Sequence[Sealed]) -> list[Slot]:
        """Write the payloads to slots that no record has."""
        limit_bytes = data_file.slab_bytes(self._capacity_bytes)
        sizes = [slot_bytes(one.payload.nbytes) for one in sealed]
        free: dict[int, Iterator[Slot]] = {}
        for size, num_slots in Counter(sizes).items():
            slots, to_punch = change.allocate(size, num_slots, limit_bytes)
            for slot in to_punch:
                self._slabs.punch(slot)
            free[size] = iter(slots)
        placed = [next(free[size]) for size in sizes]
        self._slabs.write(placed, [one.payload for one in sealed])
        return placed

    def _evict(self, change: Change, new_bytes: Mapping[bytes, int]) -> list[bytes]:
        """Make room for that many bytes of each tenant; `_StillTooMuch` if one change cannot."""
        evicted: list[bytes] = []
        for tenant, quota in self._quotas.items():
            if tenant in new_bytes:
                limit_bytes = max(0, quota - new_bytes[tenant])
                evicted += change.evict_tenant(tenant, limit_bytes)
                if change.bytes_of(tenant) > limit_bytes:
                    raise _StillTooMuch(new_bytes, evicted)
        limit_bytes = max(0, self._capacity_bytes - sum(new_bytes.values()))
        evicted += change.evict(limit_bytes)
        if change.counters.stored_bytes > limit_bytes:
            raise _StillTooMuch(new_bytes, evicted)
        return evicted

    def _make_way(self, new_bytes: Mapping[bytes, int]) -> None:
        """Make that room in as many changes as it takes."""
        is_done = False
        while not is_done:
            with self._changing() as change:
                try:
                    evicted, is_done = self._evict(change, new_bytes), True
                except _StillTooMuch as too_much:
                    evicted = too_much.evicted
            self._gone += evicted

    def _make_room(self, num_bytes: int) -> None:
        """Evict *num_bytes* more than the capacity asks for; pages and slots are free to use on return."""
        self._evict_to(max(0, self.statistics().stored_bytes - num_bytes))
        self._free_pages()

    def _free_pages(self) -> None:
        """Let be used again what is free, but held back by a dead reader, the last checkpoint or the last change."""
        with self._writer, self._in_use(), self._lmdb_errors():
            self._clear_stale_readers()
        self._take_checkpoint()
        with self._changing(LITTLE_BYTES):
            pass

    def _clear_stale_readers(self) -> None:
        self._readers_checked_at = time.monotonic()
        self._tables.env.reader_check()

    def _remove(self, act: Callable[[Change, int], _T]) -> _T:
        """Run *act*, which removes so many records at most, as one change; of few, if map or medium are full."""
        try:
            with self._changing() as change:
                return act(change, _RECORDS_PER_CHANGE)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        self._free_pages()
        with self._changing(LITTLE_BYTES) as change:
            return act(change, _RECORDS_WHEN_FULL)

    def _evict_to(self, limit_bytes: int) -> None:
        while self.statistics().stored_bytes > limit_bytes:
            self._gone += self._remove(lambda change, most: change.evict(limit_bytes, most))

    def _without_those_back(self, evicted: Iterable[bytes]) -> list[bytes]:
        """Those of *evicted* that nobody has put again, as far as that can be found out."""
        with suppress(OSError):
            return [key for key in evicted if not self.contains(key)]
        return list(evicted)

    def _seems_cached(self, key: bytes) -> bool:
        """Whether a block is in the page cache, and so perhaps its neighbours."""
        try:
            with self._in_use():
                with self._lmdb_errors(), self._tables.env.begin() as txn:
                    found = self._tables.located(txn, key)
                return found is not None and self._slabs.is_cached(found[1])
        except OSError:  # who reads it says so
            return False

    def _read_share(self, pairs: Sequence[tuple[bytes, memoryview]]) -> list[bytes | Fault]:
        results: list[bytes | Fault] = []
        for piece in _pieces(pairs):
            results += self._read_piece(piece)
        faults = [i for i, result in enumerate(results) if isinstance(result, Fault)]
        for i in faults:
            if _is_bad(results[i]):
                results[i] = self._judge(*pairs[i])
        num_bytes = sum(out.nbytes for _, out in pairs) - sum(pairs[i][1].nbytes for i in faults)
        with self._gate:
            for i in faults:
                result = results[i]
                if not isinstance(result, Fault):
                    num_bytes += pairs[i][1].nbytes
                elif result is not Fault.MISSING:
                    self._faults[result] += 1
            self._read_bytes_total += num_bytes
        return results

    def _read_piece(self, pairs: Sequence[tuple[bytes, memoryview]]) -> list[bytes | Fault]:
        """Read these blocks. Outside of a transaction: who comes between changes what is read, and that shows."""
        try:
            with self._in_use():
                with self._lmdb_errors(), self._tables.env.begin() as txn:
                    found = [self._tables.located(txn, key) for key, _ in pairs]
                values = [
                    memoryview(b"") if place is None else _target(*place, out)
                    for place, (_, out) in zip(found, pairs, strict=True)
                ]
                there = [(place[1], value) for place, value in zip(found, values, strict=True) if place is not None]
                started = time.perf_counter()
                failed = self._fill(there)
                if isinstance(self._codec, CodecChoice) and there:
                    self._codec.read(sum(slot.num_bytes for slot, _ in there), time.perf_counter() - started)
        except OSError:
            return [Fault.IO_ERROR] * len(pairs)
        return [
            Fault.MISSING
            if place is None
            else Fault.IO_ERROR
            if place[1] in failed
            else open_record(key, place[0], value, out, self._cipher)
            for (key, out), place, value in zip(pairs, found, values, strict=True)
        ]

    def _fill(self, places: Sequence[tuple[Slot, memoryview]]) -> set[Slot]:
        """Read all slots, together or, if that fails, one by one; those that cannot be read."""
        try:
            self._slabs.read([slot for slot, _ in places], [value for _, value in places])
            return set()
        except OSError:
            if len(places) == 1:
                return {places[0][0]}
        return set().union(*(self._fill([place]) for place in places))

    def verify_one(self, key: bytes) -> tuple[int, Fault | None] | None:
        """Bytes read of a record and what is wrong with it; None if there is none. Deletes and counts nothing."""
        while True:
            with self._in_use(), self._lmdb_errors():
                with self._tables.env.begin() as txn:
                    found = self._tables.located(txn, key)
                if found is None:
                    return None
                header, slot = found
                value = _scratch(slot)
                if self._fill([(slot, value)]):
                    return 0, Fault.IO_ERROR
                fault = fault_of(key, header, value, self._cipher)
                if fault is None:
                    return slot.num_bytes, None
                with self._tables.env.begin() as txn:  # or was it replaced meanwhile?
                    if self._tables.located(txn, key) == found:
                        return slot.num_bytes, fault

    def place(self, key: bytes) -> tuple[Path, int, int] | None:
        """File, offset and length of a record's slot, for who wants to see its bytes; None if there is none."""
        with self._in_use(), self._lmdb_errors(), self._tables.env.begin() as txn:
            found = self._tables.located(txn, key)
        return None if found is None else self._slabs.place(found[1])

    def _judge(self, key: bytes, out: memoryview) -> bytes | Fault:
        """Read *key*, found bad, once more with writers kept out, and delete it if it still is.

        Between the two it may have been replaced by a good record, which must stay.
        """
        with self._writer:
            (result,) = self._read_piece([(key, out)])
            if _is_bad(result):
                try:
                    self.delete([key])
                except OSError as error:
                    _log.warning("store %s: cannot delete a bad record: %s", self._folder, error)
            return result


def _is_bad(result: bytes | Fault) -> bool:
    """Whether a read met a record that must go."""
    return isinstance(result, Fault) and result.is_bad_record


def _target(header: bytes, slot: Slot, out: memoryview) -> memoryview:
    """Where to read a slot to: *out* itself, if what is in it is the block."""
    return out if out.nbytes <= slot.num_bytes and is_plain(header, out.nbytes) else _scratch(slot)


def _scratch(slot: Slot) -> memoryview:
    """Memory for a whole slot, aligned."""
    return memoryview(mmap.mmap(-1, slot.num_bytes))


def _charged_bytes(blobs: Sequence[Blob]) -> int:
    """About as much as they will be charged; with encryption, a page each too little."""
    return sum(charged_bytes(blob.raw.nbytes) for blob in blobs)


def _pieces(pairs: Sequence[tuple[bytes, memoryview]]) -> Iterator[Sequence[tuple[bytes, memoryview]]]:
    """Runs of *pairs* of at most _READ_BYTES, or of one block."""
    start = num_bytes = 0
    for i, (_, out) in enumerate(pairs):
        if i > start and num_bytes + out.nbytes > _READ_BYTES:
            yield pairs[start:i]
            start, num_bytes = i, 0
        num_bytes += out.nbytes
    yield pairs[start:]


def _parts(blobs: Sequence[Blob], most_bytes: int) -> Iterator[list[Blob]]:
    """Runs of *blobs* of at most *most_bytes*, or of one blob."""
    part: list[Blob] = []
    num_bytes = 0
    for blob in blobs:
        blob_bytes = charged_bytes(blob.raw.nbytes)
        if part and num_bytes + blob_bytes > most_bytes:
            yield part
            part, num_bytes = [], 0
        part.append(blob)
        num_bytes += blob_bytes
    if part:
        yield part
