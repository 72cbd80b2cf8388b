"""The index of an LMDB store: its sub-databases (`Tables`) and the file that LMDB maps into memory (`IndexFile`)."""

import ctypes
import errno
import math
import os
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, starmap
from operator import lt
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb
import xxhash

from kvtier.store.blob_store import MAX_KEY_BYTES, TENANT_BYTES
from kvtier.store.durability import Durability
from kvtier.store.folder import open_private
from kvtier.store.record import HEADER_BYTES
from kvtier.store.slab import PAGE_BYTES, Slot

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MAX = 1 << 62  # no count gets that high
_CHECKSUM_BYTES = 8
_WRONG_CHECKSUM = "a row makes no sense: its checksum is wrong"
_TABLES = (b"records", b"free", b"holes", b"slabs", b"order", b"owned", b"tenants", b"ledger")
MAX_DBS = len(_TABLES)
_MAX_READERS = 256
_LOCK_BYTES = (_MAX_READERS + 64) * 64  # minimum: LMDB takes 64 bytes per reader, and 200 for the file
_parents: "weakref.WeakSet[Any]" = weakref.WeakSet()  # open objects that a forked process must not close
# A change that adds records leaves this many pages free, so that evictions are possible even on a full disk. The pages
# are enough to evict 3 records and to skip 3 marked ones, in trees that are three levels deep.
SPARE_PAGES = 64
MIN_REMOVAL_BYTES = SPARE_PAGES * PAGE_BYTES
_AHEAD_BYTES = 8 << 20  # disk space reserved at a time


def checksum(key: bytes, row: bytes = b"") -> bytes:
    """Return the checksum of *key* and *row*, which the index stores at the end of the row."""
    return xxhash.xxh3_64_digest(key + row)


def verified(key: bytes, packed: bytes) -> bytes:
    """Return *packed* without its checksum. Raises CorruptedError if the checksum is wrong."""
    row = packed[:-_CHECKSUM_BYTES]
    if packed[-_CHECKSUM_BYTES:] != xxhash.xxh3_64_digest(key + row):
        raise lmdb.CorruptedError(_WRONG_CHECKSUM)
    return row


class _Layout(struct.Struct):
    """A `struct.Struct` for keys or values in LMDB. `unpack` raises CorruptedError if the bytes have another length."""

    def unpack(self, row: "Buffer") -> tuple[Any, ...]:
        try:
            return super().unpack(row)
        except struct.error as error:
            raise lmdb.CorruptedError(f"a row makes no sense: {error}") from error


class _Counts:
    """A binary format of rows that hold counts and a checksum. A negative or huge count raises CorruptedError."""

    def __init__(self, layout: str) -> None:
        self._layout = _Layout(layout)

    def pack(self, key: bytes, *counts: float) -> bytes:
        row = self._layout.pack(*self._plausible(counts))
        return row + checksum(key, row)

    def unpack(self, key: bytes, packed: bytes) -> tuple[Any, ...]:
        return self._plausible(self._layout.unpack(verified(key, packed)))

    def _plausible(self, counts: tuple[Any, ...]) -> tuple[Any, ...]:
        if not all(0 <= count < _MAX for count in counts):
            raise lmdb.CorruptedError(f"a row makes no sense: its counts are {counts}")
        return counts


class _Slots(_Layout):
    """A binary format of keys that describe a slot. LMDB's value for such a key is only the key's checksum."""

    def unpack_key(self, key: bytes, packed: bytes) -> tuple[int, ...]:
        if packed != checksum(key):
            raise lmdb.CorruptedError(_WRONG_CHECKSUM)
        return self.unpack(key)


SEQUENCE = _Layout(">Q")  # big-endian, so that LMDB's byte order is the order of age
# Key of a row of free slots: the slots' size, the number of the change (`Counters.num_changes`) that freed them, and
# the number of the first slot. The value lists the numbers of all slots, because a change frees many slots at once.
FREE = _Layout(">IQQ")
SLOTS_PER_ROW = 240  # maximum per row of free slots; LMDB stores a longer value in pages of its own
HOLE = _Slots(">IQ")  # a hole, which is a free slot without disk space: its size, its number
SLOTS = _Counts("<Q")
BYTES_OF_TENANT = _Counts("<Q")
COUNTERS_KEY = b"counters"
NO_TENANT = bytes(TENANT_BYTES)
# Sequence number, charged bytes, mark, tenant, size and number of the slot; header and parent's key follow.
_ROW = _Layout(f">QQ?{TENANT_BYTES}sIQ")
_ROW_BYTES = _ROW.size
_PARENT_AT = _ROW_BYTES + HEADER_BYTES
_SLOT_OF_ROW = struct.Struct(">IQ")
_SLOT_AT = _ROW.size - _SLOT_OF_ROW.size
_COUNTERS = _Counts("<7Qd3Q")
_DAY_S = 86_400.0


@dataclass(slots=True)
class Counters:
    """The counters of a store, which the index keeps in a single row.

    Some counters are sums over all records, so that the records need not be counted. The others are totals since the
    store was created.
    """

    num_records: int = 0
    stored_bytes: int = 0
    next_sequence: int = 0
    written_bytes_total: int = 0
    evicted_total: int = 0
    capacity_bytes: int = 0  # with which the store was last opened
    recent_written_bytes: int = 0  # decaying by two thirds a day
    written_lately_at: float = 0.0  # when `recent_written_bytes` was computed, in seconds since 1970
    num_changes: int = 0
    slab_bytes: int = 0  # of all slots that take disk space
    quota_evicted_total: int = 0  # part of `evicted_total`

    @classmethod
    def unpack(cls, packed: bytes) -> "Counters":
        """Return the counters that `pack` has turned into the bytes *packed*."""
        return cls(*_COUNTERS.unpack(COUNTERS_KEY, packed))

    def pack(self) -> bytes:
        """Return the bytes that LMDB stores for these counters."""
        return _COUNTERS.pack(COUNTERS_KEY, *(getattr(self, name) for name in self.__slots__))

    def on_written(self, num_bytes: int, now: float) -> None:
        """Count *num_bytes* of payload written at *now* (seconds since 1970)."""
        self.written_bytes_total += num_bytes
        self.recent_written_bytes = self.lately_bytes(now) + num_bytes
        self.written_lately_at = now

    def lately_bytes(self, now: float) -> int:
        """Return the recently written bytes at *now* (seconds since 1970): a sum that decays by two thirds a day."""
        return round(self.recent_written_bytes * math.exp(-max(0.0, now - self.written_lately_at) / _DAY_S))


class RecordRow(NamedTuple):
    """The row of a record in the table `records`: everything about the record except its payload."""

    sequence: int
    charged_bytes: int
    is_marked: bool
    tenant: bytes
    slot: Slot
    header: bytes
    parent: bytes

    @classmethod
    def unpack(cls, key: bytes, packed: bytes) -> "RecordRow":
        """Unpack the row at *key*."""
        row = verified(key, packed)
        if len(row) < _ROW_BYTES:
            raise lmdb.CorruptedError("a row makes no sense: it is too short")
        sequence, charged, is_marked, tenant, num_bytes, number = _ROW.unpack_from(row)
        slot = plausible(Slot(num_bytes, number))
        return cls(sequence, charged, is_marked, tenant, slot, row[_ROW_BYTES:_PARENT_AT], row[_PARENT_AT:])

    def pack(self, key: bytes) -> bytes:
        """Return the bytes that LMDB stores at *key*: this row, and a checksum of *key* and row."""
        return packed_row(key, *self)


def packed_row(
    key: bytes,
    sequence: int,
    charged_bytes: int,
    is_marked: bool,
    tenant: bytes,
    slot: Slot,
    header: bytes,
    parent: bytes,
) -> bytes:
    """Return the row at *key* with these fields, as `RecordRow.pack` does, but without making a `RecordRow`."""
    row = _ROW.pack(sequence, charged_bytes, is_marked, tenant, *slot) + header + parent
    return row + xxhash.xxh3_64_digest(key + row)


class OldRow(NamedTuple):
    """The fields of a record's row that decide about its eviction."""

    charged_bytes: int
    is_marked: bool
    slot_bytes: int
    slot_number: int

    @classmethod
    def unpack(cls, key: bytes, packed: bytes, place: bytes, tenant: bytes) -> "OldRow":
        """Unpack the row at *key*, which the eviction order names at *place* for *tenant*.

        Takes half the time of `RecordRow.unpack`. Raises CorruptedError if the row does not match.
        """
        row = packed[:-_CHECKSUM_BYTES]
        if packed[-_CHECKSUM_BYTES:] != xxhash.xxh3_64_digest(key + row):  # as `verified` does
            raise lmdb.CorruptedError(_WRONG_CHECKSUM)
        if len(row) < _ROW_BYTES or not row.startswith(place):  # a row begins with its sequence number
            raise lmdb.CorruptedError("an entry of the eviction order does not match its record")
        _, charged_bytes, is_marked, owner, slot_bytes, slot_number = _ROW.unpack_from(row)
        if owner != tenant:
            raise lmdb.CorruptedError("an entry of the eviction order does not match its record")
        if slot_bytes == 0 or slot_bytes % PAGE_BYTES or (slot_number + 1) * slot_bytes >> 62:
            plausible(Slot(slot_bytes, slot_number))  # raises
        return cls(charged_bytes, is_marked, slot_bytes, slot_number)


def free_rows(num_bytes: int, change: int, numbers: Sequence[int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows that list the slots *numbers* of *num_bytes*, in ascending order, as freed by *change*."""
    for start in range(0, len(numbers), SLOTS_PER_ROW):
        part = numbers[start : start + SLOTS_PER_ROW]
        key, row = FREE.pack(num_bytes, change, part[0]), struct.pack(f">{len(part)}Q", *part)
        yield key, row + checksum(key, row)


def free_row(key: bytes, packed: bytes) -> tuple[int, int, tuple[int, ...]]:
    """Unpack a row of free slots: their size, the number of the change that freed them, and their numbers."""
    num_bytes, change, first = FREE.unpack(key)
    row = verified(key, packed)
    numbers = struct.unpack(f">{len(row) // 8}Q", row) if row and len(row) % 8 == 0 else ()
    if numbers[:1] != (first,):
        raise lmdb.CorruptedError("a row makes no sense: it does not list the slot that its key names")
    return num_bytes, change, numbers


def plausible(slot: Slot) -> Slot:
    """Return *slot* unchanged. Raises CorruptedError if no file can contain such a slot."""
    if slot.num_bytes == 0 or slot.num_bytes % PAGE_BYTES or (slot.number + 1) * slot.num_bytes >> 62:
        raise lmdb.CorruptedError(f"a row names a slot that cannot exist: {slot}")
    return slot


class IndexFile:
    """The data file of the LMDB environment *env*. *descriptor* is an open descriptor of the same file.

    The class reserves disk space before LMDB writes to the file. `close` closes *env* and *descriptor*. Any thread may
    call `sync`; only the store's writer calls the other methods.
    """

    def __init__(self, env: lmdb.Environment, descriptor: int) -> None:
        self.env = env
        self._descriptor: int | None = descriptor
        self._syncing = threading.Lock()
        self.sync_failed = False  # whether the last sync failed; `_syncing` guards it
        self.reserved_bytes = self.used_bytes()  # pages in use have their disk space

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    @property
    def is_removed(self) -> bool:
        """True if the file has been deleted, so that its content is lost once it is closed."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Unmap and close the file. A second call does nothing.

        No transaction may be open, because LMDB would then crash the process.
        """
        self.env.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def used_bytes(self) -> int:
        """Return the bytes of the file up to the last page in use."""
        return (self.env.info()["last_pgno"] + 1) * PAGE_BYTES

    def taken_bytes(self) -> int:
        """Return the disk space that the file takes."""
        return os.fstat(self._open_descriptor()).st_blocks * 512

    def sync(self) -> None:
        """Block until the file, with everything written before the call, is on disk.

        Raises OSError or lmdb.Error if that fails. After a failure every call raises until the writer has called
        `rewrite`.
        """
        with self._syncing:
            if self.sync_failed:
                raise OSError(errno.EIO, "an earlier sync of the index failed")
            try:
                self.env.sync(True)
            except lmdb.Error:
                self.sync_failed = True
                raise

    def rewrite(self) -> None:
        """Write all pages to the file again, so that the next sync writes them to disk.

        Call this after a failed sync. The kernel reports only once that it could not write pages, and then treats them
        as written. Without this call the next sync would succeed although those pages are not on disk.
        """
        descriptor = self._open_descriptor()
        with self._syncing:
            for start in range(0, self.used_bytes(), _AHEAD_BYTES):
                pages = os.pread(descriptor, _AHEAD_BYTES, start)
                if os.pwrite(descriptor, pages, start) < len(pages):
                    raise OSError(errno.EIO, "the index could not be written again")
            self.sync_failed = False

    def reserve(self, new_bytes: int) -> None:
        """Reserve disk space for *new_bytes* beyond the pages in use. Raises OSError if the disk is full.

        Without reserved space, a write to the mapped file on a full disk raises SIGBUS instead of ENOSPC.
        """
        map_bytes = self.env.info()["map_size"]
        wanted = min(self.used_bytes() + new_bytes, map_bytes)
        if wanted > self.reserved_bytes:
            try:
                self._reserve_up_to(min(wanted + _AHEAD_BYTES, map_bytes))
            except OSError:  # perhaps there is room for exactly what is needed
                self._reserve_up_to(wanted)

    def is_nearly_full(self, new_bytes: int) -> bool:
        """Return whether *new_bytes* of new pages might leave too little room in LMDB's map for later evictions."""
        return self.used_bytes() + new_bytes + MIN_REMOVAL_BYTES > self.env.info()["map_size"]

    def _reserve_up_to(self, end: int) -> None:
        os.posix_fallocate(self._open_descriptor(), self.reserved_bytes, end - self.reserved_bytes)
        self.reserved_bytes = end

    def _open_descriptor(self) -> int:
        assert self._descriptor is not None, "the index is closed"
        return self._descriptor


class Tables:
    """The index of a store: an LMDB environment with eight sub-databases.

    The index does not contain the payloads. They are in the slots of `Slabs`, the files in the same folder. A free slot
    without disk space is a hole.

    The sequence number of a record is its place in the eviction order. Its charged bytes count against the capacity.
    Its mark says that it was used recently, so that eviction skips it once.

    records   key -> sequence number, charged bytes, mark, tenant, slot, header, parent's key
    order     sequence number -> tenant and key, oldest first
    owned     tenant and sequence number -> key: the same order for each tenant
    free      free slots that have disk space: slot size, number of the change that freed the slots, number of the first
              slot -> numbers of all slots of the row
    holes     free slots without disk space: slot size, slot number
    slabs     slot size -> number of slots
    tenants   tenant -> charged bytes
    ledger    the row of `Counters`
    """

    def __init__(self, file: IndexFile, tables: "Sequence[lmdb._Database]") -> None:
        self.file = file
        self.env = file.env
        (
            self.records,
            self.free,
            self.holes,
            self.slabs,
            self.order,
            self.owned,
            self.tenants,
            self.ledger,
        ) = tables

    @staticmethod
    def capacity_in(env: lmdb.Environment) -> int:
        """Return the capacity that is recorded in *env*, an environment opened for reading only."""
        return Tables.counters_in(env).capacity_bytes

    @staticmethod
    def counters_in(env: lmdb.Environment) -> Counters:
        """Return the counters that are recorded in *env*, an environment opened for reading only."""
        ledger = env.open_db(b"ledger", create=False)
        with env.begin() as txn:
            packed = txn.get(COUNTERS_KEY, db=ledger)
        return Counters() if packed is None else Counters.unpack(packed)

    def counters(self, txn: "lmdb.Transaction[bytes] | lmdb.Transaction[memoryview]") -> Counters:
        """Return the store's counters as *txn* sees them."""
        packed = txn.get(COUNTERS_KEY, db=self.ledger)
        return Counters() if packed is None else Counters.unpack(bytes(packed))

    def num_slots(self, txn: "lmdb.Transaction[bytes]") -> dict[int, int]:
        """Return the number of slots in each slab, by the size of its slots."""
        return {int.from_bytes(size, "big"): SLOTS.unpack(size, packed)[0] for size, packed in _rows(txn, self.slabs)}

    def free_numbers(
        self, txn: "lmdb.Transaction[bytes]", num_bytes: int, usable_before: int
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Iterate over the free slots of *num_bytes* with disk space that changes up to *usable_before* have freed.

        Yields pairs in the order of the changes: the number of a change, and the numbers of slots that it freed.
        """
        with txn.cursor(db=self.free) as cursor:
            if not cursor.set_range(FREE.pack(num_bytes, 0, 0)):
                return
            for key, row in ascending(cursor):
                size, change, numbers = free_row(key, row)
                if size != num_bytes or change > usable_before:
                    return
                yield change, numbers

    def hole_slots(self, txn: "lmdb.Transaction[bytes]", num_bytes: int | None = None) -> Iterator[Slot]:
        """Iterate over the holes, which are the free slots without disk space, of *num_bytes* (None: of all sizes)."""
        with txn.cursor(db=self.holes) as cursor:
            is_there = cursor.set_range(b"" if num_bytes is None else HOLE.pack(num_bytes, 0))
            for row in ascending(cursor) if is_there else ():
                slot = Slot(*HOLE.unpack_key(*row))
                if num_bytes not in (None, slot.num_bytes):
                    return
                yield slot

    def unallocated(self, txn: "lmdb.Transaction[bytes]", slots: Iterable[Slot]) -> list[Slot]:
        """Return those of *slots* that should have no disk space: holes, and slots beyond the end of their slab."""
        ends = self.num_slots(txn)
        return [
            slot
            for slot in slots
            if slot.number >= ends.get(slot.num_bytes, 0) or txn.get(HOLE.pack(*slot), db=self.holes) is not None
        ]

    def located(self, txn: "lmdb.Transaction[bytes]", key: bytes) -> tuple[bytes, Slot] | None:
        """Return the header and the slot of the record of *key*, or None if *key* has no record."""
        return self.all_located(txn, (key,))[0]

    def all_located(self, txn: "lmdb.Transaction[bytes]", keys: Sequence[bytes]) -> list[tuple[bytes, Slot] | None]:
        """Return the header and the slot of the record of each key, or None if the key has no record."""
        with txn.cursor(db=self.records) as cursor:
            rows = dict(cursor.getmulti([key for key in keys if 0 < len(key) <= MAX_KEY_BYTES]))
        found: list[tuple[bytes, Slot] | None] = []
        place_of, digest_of = _SLOT_OF_ROW.unpack_from, xxhash.xxh3_64_digest
        for key in keys:
            packed = rows.get(key)
            if packed is None:
                found.append(None)
                continue
            row = packed[:-_CHECKSUM_BYTES]
            if packed[-_CHECKSUM_BYTES:] != digest_of(key + row):  # as `verified` does
                raise lmdb.CorruptedError(_WRONG_CHECKSUM)
            found.append((row[_ROW_BYTES:_PARENT_AT], plausible(Slot(*place_of(row, _SLOT_AT)))))
        return found

    def has(self, txn: "lmdb.Transaction[bytes]", keys: Iterable[bytes]) -> set[bytes]:
        """Return those of *keys*, which must be valid keys, that have a record."""
        with txn.cursor(db=self.records) as cursor:
            return {key for key, _ in cursor.getmulti(keys)}

    def keys_before(self, txn: "lmdb.Transaction[bytes]", sequence: int | None, limit: int) -> list[tuple[int, bytes]]:
        """Return the sequence numbers and keys of up to *limit* records older than *sequence*, newest first.

        If *sequence* is None, return the newest records.
        """
        with txn.cursor(db=self.order) as cursor:
            if sequence is None:
                is_there = cursor.last()
            else:
                is_there = cursor.prev() if cursor.set_range(SEQUENCE.pack(sequence)) else cursor.last()
            rows = cursor.iterprev() if is_there else iter(())
            page = [
                (SEQUENCE.unpack(place)[0], verified(place, row)[TENANT_BYTES:]) for place, row in islice(rows, limit)
            ]
        for before, after in pairwise([(sequence, b""), *page]):
            if before[0] is not None and before[0] <= after[0]:  # otherwise a caller's loop might never end
                raise lmdb.CorruptedError("the keys of a table are out of order")
        return page

    def bytes_of_tenants(self, txn: "lmdb.Transaction[bytes]", tenants: Iterable[bytes]) -> dict[bytes, int]:
        """Return the charged bytes of each of *tenants* that has records."""
        found = {tenant: txn.get(tenant, db=self.tenants) for tenant in tenants if tenant}
        return {
            tenant: BYTES_OF_TENANT.unpack(tenant, packed)[0] for tenant, packed in found.items() if packed is not None
        }

    def check(self, txn: "lmdb.Transaction[bytes]") -> None:
        """Raise AssertionError if the sub-databases disagree, or a record would be evicted before its child block."""
        counters = self.counters(txn)
        places = {verified(place, row): place for place, row in _rows(txn, self.order)}
        order = {owned[TENANT_BYTES:]: SEQUENCE.unpack(place)[0] for owned, place in places.items()}
        owners = {owned[TENANT_BYTES:]: owned[:TENANT_BYTES] for owned in places}
        rows = {key: RecordRow.unpack(key, row) for key, row in _rows(txn, self.records)}

        assert {key: row.sequence for key, row in rows.items()} == order, "records and order disagree"
        assert txn.stat(db=self.order)["entries"] == len(order), "a key is in the order twice"
        assert counters.num_records == len(rows), f"num_records is {counters.num_records}, recount {len(rows)}"
        recount = sum(row.charged_bytes for row in rows.values())
        assert counters.stored_bytes == recount, f"stored_bytes is {counters.stored_bytes}, recount {recount}"
        assert {key: row.tenant for key, row in rows.items()} == owners, "records and order disagree about tenants"
        owned = {key: (place[:TENANT_BYTES], place[TENANT_BYTES:]) for place, key in _rows(txn, self.owned)}
        expected = {
            key: (row.tenant, SEQUENCE.pack(row.sequence)) for key, row in rows.items() if row.tenant != NO_TENANT
        }
        assert owned == expected, "records and the tenants' orders disagree"
        of_tenants: Counter[bytes] = Counter()
        for row in rows.values():
            of_tenants[row.tenant] += row.charged_bytes
        of_tenants.pop(NO_TENANT, None)
        all_tenants = [tenant for tenant, _ in _rows(txn, self.tenants)]
        assert self.bytes_of_tenants(txn, all_tenants) == of_tenants, "a tenant's bytes are miscounted"
        self._check_slots(txn, [row.slot for row in rows.values()], counters.slab_bytes)
        newest = max(order.values(), default=-1)
        assert newest < counters.next_sequence, f"sequence {newest} is not below {counters.next_sequence}"
        for row in rows.values():
            parent = rows.get(row.parent)
            is_safe = parent is None or parent.is_marked or parent.sequence > row.sequence
            assert is_safe, "a record would be evicted before its child"

    def _check_slots(self, txn: "lmdb.Transaction[bytes]", used: list[Slot], slab_bytes: int) -> None:
        listed = starmap(free_row, _rows(txn, self.free))
        free = [Slot(num_bytes, number) for num_bytes, _, numbers in listed for number in numbers]
        slots = used + free + list(self.hole_slots(txn))
        assert len(set(slots)) == len(slots), "a slot is in two states at once"
        there = self.num_slots(txn)
        assert all(number < there.get(num_bytes, 0) for num_bytes, number in slots), "a slot beyond its slab is used"
        assert len(slots) == sum(there.values()), "a slot has no record, but is not listed as free"
        taken = sum(slot.num_bytes for slot in used + free)
        assert taken == slab_bytes, f"slab_bytes is {slab_bytes}, recount {taken}"


def open_tables(folder: Path, map_bytes: int, durability: Durability) -> Tables:
    """Open the tables of the index in *folder*, creating them if there are none. Raises OSError or lmdb.Error."""
    _take_room(folder / "lock.mdb", _LOCK_BYTES)
    descriptor = open_private(folder / "data.mdb", os.O_RDWR | os.O_CREAT)
    try:
        env = _opened(folder, map_bytes, durability)
    except BaseException:
        os.close(descriptor)
        raise
    keep_when_forked(env)
    file = IndexFile(env, descriptor)
    try:
        env.reader_check()
        is_new = env.stat()["entries"] == 0
        if is_new:
            file.reserve(MIN_REMOVAL_BYTES)
        tables = Tables(file, [_table(env, name, is_new) for name in _TABLES])
        with env.begin() as txn:
            tables.counters(txn)
            tables.num_slots(txn)
    except BaseException:
        file.close()
        raise
    return tables


def _table(env: lmdb.Environment, name: bytes, is_new: bool) -> "lmdb._Database":
    """Open the sub-database *name*, and create it if the environment is new.

    Raises CorruptedError if the environment is not new but lacks the sub-database.
    """
    try:
        return env.open_db(name, create=is_new)
    except lmdb.NotFoundError as error:
        raise lmdb.CorruptedError(f"the table {name.decode()} is missing") from error


def keep_when_forked(opened: "lmdb.Environment | lmdb.Transaction[bytes]") -> None:
    """Prevent a process forked from this one from freeing *opened*.

    Both processes share LMDB's table of readers. If the child freed *opened*, this process would lose its entry in the
    table, and LMDB would overwrite pages that this process still reads.
    """
    _parents.add(opened)


def _keep_parents() -> None:
    for opened in _parents:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(opened))


os.register_at_fork(after_in_child=_keep_parents)


def _opened(folder: Path, map_bytes: int, durability: Durability) -> lmdb.Environment:
    # Without readahead cold reads are 14 times slower. The map size never changes, because LMDB would unmap pages that
    # a reader uses. For `writemap` and `sync` see `Durability`.
    return lmdb.open(
        str(folder),
        map_size=map_bytes,
        max_dbs=MAX_DBS,
        max_readers=_MAX_READERS,
        max_spare_txns=16,
        writemap=durability.is_mapped,
        sync=not durability.is_mapped,
        readahead=True,
        mode=0o600,
    )


def _take_room(path: Path, num_bytes: int) -> None:
    """Reserve disk space for the first *num_bytes* of a mapped file, as `IndexFile.reserve` does. Raises OSError."""
    file = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    finally:
        os.close(file)


def check_ascending(keys: Sequence[bytes], start: bytes = b"") -> None:
    """Raise CorruptedError unless *keys* ascend from *start*, as `ascending` does."""
    if keys and (keys[0] < start or not all(map(lt, keys, keys[1:]))):
        raise lmdb.CorruptedError("the keys of a table are out of order")


def ascending(rows: Iterable[tuple[bytes, bytes]], start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    """Yield *rows*. Raises CorruptedError unless their keys ascend from *start*.

    Without this check, iterating over a damaged tree might never end.
    """
    last = None
    for key, row in rows:
        if key < start or (last is not None and key <= last):
            raise lmdb.CorruptedError("the keys of a table are out of order")
        last = key
        yield key, row


def _rows(txn: "lmdb.Transaction[bytes]", db: "lmdb._Database") -> Iterator[tuple[bytes, bytes]]:
    return ascending(txn.cursor(db=db))
