"""The sub-databases of an LMDB store, and the one transaction that changes them together."""

import math
import os
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import lmdb

from kvtier.store.blob_store import TENANT_BYTES, Blob
from kvtier.store.durability import Durability
from kvtier.store.record import HEADER_BYTES
from kvtier.store.seal import Sealed
from kvtier.store.slab import Slot

_SEQUENCE = struct.Struct(">Q")  # big-endian, so that LMDB's byte order is the order of age
# Sequence number, charged bytes, mark, tenant, size and number of the slot; header and parent's key follow.
_ROW = struct.Struct(f">QQ?{TENANT_BYTES}sIQ")
_FREE = struct.Struct(">IQQ")  # size of the slot, the change that freed it, its number
_HOLE = struct.Struct(">IQ")  # size, number
_SLOTS = struct.Struct("<Q")
_COUNTERS = struct.Struct("<7Qd2Q")
_COUNTERS_KEY = b"counters"
_TENANT_BYTES_OF = struct.Struct("<Q")
_NOBODY = bytes(TENANT_BYTES)
_DAY_S = 86_400.0
_PAGE_BYTES = 4096
MAX_DBS = 7
_SPARE_PAGES = 64  # left free by every change that adds: what a deletion of 8 records needs, three levels deep
_SPARE_VALUE = bytes(_PAGE_BYTES // 2)  # LMDB gives it a page of its own
REMOVAL_BYTES = 8 << 20  # of pages that a change may make new that only removes: see `_MOST_SECOND_CHANCES`
LITTLE_BYTES = _SPARE_PAGES * _PAGE_BYTES  # if it removes 8 records at most
_AHEAD_BYTES = 8 << 20  # of disk space that is taken at a time
_ROWS_AT_ONCE = 16
_MOST_SECOND_CHANCES = 512  # of one change: up to 3 index pages each, 6 MiB


@dataclass(slots=True)
class Counters:
    """The ledger: what a full count would give, and totals since the store was made."""

    num_records: int = 0
    stored_bytes: int = 0
    next_sequence: int = 0
    written_bytes_total: int = 0
    evicted_total: int = 0
    capacity_bytes: int = 0  # with which the store was last opened
    written_lately_bytes: int = 0  # fading, by two thirds a day
    written_lately_at: float = 0.0  # seconds since 1970
    num_changes: int = 0
    slab_bytes: int = 0  # of all slots that take room on the medium

    def pack(self) -> bytes:
        """As it is kept."""
        return _COUNTERS.pack(*(getattr(self, name) for name in self.__slots__))

    def wrote(self, num_bytes: int, now: float) -> None:
        """That much has been written."""
        self.written_bytes_total += num_bytes
        fading = math.exp(-max(0.0, now - self.written_lately_at) / _DAY_S)
        self.written_lately_bytes = int(self.written_lately_bytes * fading) + num_bytes
        self.written_lately_at = now


class Row(NamedTuple):
    """What is kept of a record besides its payload."""

    sequence: int
    charged_bytes: int
    is_marked: bool
    tenant: bytes
    slot: Slot
    header: bytes
    parent: bytes

    @classmethod
    def unpack(cls, row: bytes) -> "Row":
        """A row as it is kept."""
        end = _ROW.size + HEADER_BYTES
        *facts, num_bytes, number = _ROW.unpack_from(row)
        slot = _plausible(Slot(num_bytes, number))
        return cls(*facts, slot, row[_ROW.size : end], row[end:])  # type: ignore[call-arg]

    def pack(self) -> bytes:
        """As it is kept."""
        return _ROW.pack(*self[:4], *self.slot) + self.header + self.parent


class Tables:
    """One LMDB environment with seven sub-databases. Payloads are in slots of the `Slabs` beside it.

    records   key -> sequence number, charged bytes, mark, tenant, slot, header, parent's key
    order     sequence number -> tenant and key, oldest first
    free      slots without a record: size, change that freed it, number
    holes     those of them that take no room on the medium: size, number
    slabs     size -> how many slots there are
    tenants   tenant -> charged bytes
    ledger    `Counters`
    """

    def __init__(self, folder: Path, map_bytes: int, durability: Durability) -> None:
        # Without readahead cold reads are 14 times slower. The map size never changes: LMDB would pull it from under a
        # reader. For the other two see `Durability`.
        self.env = lmdb.open(
            str(folder),
            map_size=map_bytes,
            max_dbs=MAX_DBS,
            max_readers=256,
            max_spare_txns=16,
            writemap=durability.is_mapped,
            sync=not durability.is_mapped,
            readahead=True,
        )
        self._data_file: int | None = os.open(folder / "data.mdb", os.O_RDWR)
        self._reserved_bytes = self._used_bytes()  # pages in use got their disk space before they were
        try:
            self.env.reader_check()
            if self.env.stat()["entries"] == 0:
                self.reserve(LITTLE_BYTES)
            self.records = self.env.open_db(b"records")
            self.free = self.env.open_db(b"free")
            self.holes = self.env.open_db(b"holes")
            self.slabs = self.env.open_db(b"slabs")
            self.order = self.env.open_db(b"order")
            self.tenants = self.env.open_db(b"tenants")
            self.ledger = self.env.open_db(b"ledger")
            with self.env.begin() as txn:
                self.counters(txn)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def capacity_in(env: lmdb.Environment) -> int:
        """The capacity in the ledger of an environment that is open for reading only."""
        return Tables.counters_in(env).capacity_bytes

    @staticmethod
    def counters_in(env: lmdb.Environment) -> Counters:
        """The ledger of an environment that is open for reading only."""
        ledger = env.open_db(b"ledger", create=False)
        with env.begin() as txn:
            packed = txn.get(_COUNTERS_KEY, db=ledger)
        return Counters() if packed is None else Counters(*_COUNTERS.unpack(packed))

    @property
    def is_open(self) -> bool:
        return self._data_file is not None

    def close(self) -> None:
        """Unmap; a transaction still open elsewhere would crash the process. Once more does nothing."""
        self.env.close()
        if self._data_file is not None:
            os.close(self._data_file)
            self._data_file = None

    def reserve(self, new_bytes: int) -> None:
        """Have disk space for *new_bytes* beyond the pages in use; OSError if there is none.

        Writing to a hole of a mapped file on a full disk is SIGBUS, not ENOSPC.
        """
        map_bytes = self.env.info()["map_size"]
        wanted = min(self._used_bytes() + new_bytes, map_bytes)
        if wanted > self._reserved_bytes:
            try:
                self._reserve_up_to(min(wanted + _AHEAD_BYTES, map_bytes))
            except OSError:  # perhaps there is room for what is needed
                self._reserve_up_to(wanted)

    def _reserve_up_to(self, end: int) -> None:
        assert self._data_file is not None, "the index is closed"
        os.posix_fallocate(self._data_file, self._reserved_bytes, end - self._reserved_bytes)
        self._reserved_bytes = end

    def is_nearly_full(self, new_bytes: int) -> bool:
        """Whether *new_bytes* and the spare pages might not fit after the last page in use."""
        return self._used_bytes() + new_bytes + _SPARE_PAGES * _PAGE_BYTES > self.env.info()["map_size"]

    def index_bytes(self) -> int:
        """What the data file takes on the medium."""
        assert self._data_file is not None, "the index is closed"
        return os.fstat(self._data_file).st_blocks * 512

    def counters(self, txn: "lmdb.Transaction[bytes] | lmdb.Transaction[memoryview]") -> Counters:
        """The ledger as *txn* sees it."""
        packed = txn.get(_COUNTERS_KEY, db=self.ledger)
        return Counters() if packed is None else Counters(*_COUNTERS.unpack(packed))

    def located(self, txn: "lmdb.Transaction[bytes]", key: bytes) -> tuple[bytes, Slot] | None:
        """Header and slot of *key*."""
        packed = txn.get(key, db=self.records)
        if packed is None:
            return None
        *_, num_bytes, number = _ROW.unpack_from(packed)
        return packed[_ROW.size : _ROW.size + HEADER_BYTES], _plausible(Slot(num_bytes, number))

    def keys_before(self, txn: "lmdb.Transaction[bytes]", sequence: int | None, most: int) -> list[tuple[int, bytes]]:
        """Up to *most* records older than *sequence* (None: the newest), as sequence number and key, newest first."""
        with txn.cursor(db=self.order) as cursor:
            if sequence is None:
                is_there = cursor.last()
            else:
                is_there = cursor.prev() if cursor.set_range(_SEQUENCE.pack(sequence)) else cursor.last()
            rows = cursor.iterprev() if is_there else iter(())
            page = [(_SEQUENCE.unpack(packed)[0], key[TENANT_BYTES:]) for packed, key in islice(rows, most)]
        if page and sequence is not None and page[0][0] >= sequence:  # who goes on from the last would never end
            raise lmdb.CorruptedError("the order is out of order")
        return page

    def bytes_of_tenants(self, txn: "lmdb.Transaction[bytes] | lmdb.Transaction[memoryview]") -> dict[bytes, int]:
        """What each tenant has."""
        rows = txn.cursor(db=self.tenants)
        return {bytes(tenant): _TENANT_BYTES_OF.unpack(packed)[0] for tenant, packed in rows}

    def check(self, txn: "lmdb.Transaction[bytes]") -> None:
        """AssertionError if ledger, order, records and payloads disagree, or a record might leave before its child."""
        counters = self.counters(txn)
        order = {key[TENANT_BYTES:]: _SEQUENCE.unpack(packed)[0] for packed, key in txn.cursor(db=self.order)}
        owners = {key[TENANT_BYTES:]: key[:TENANT_BYTES] for key in txn.cursor(db=self.order).iternext(keys=False)}
        rows = {key: Row.unpack(row) for key, row in txn.cursor(db=self.records)}

        assert {key: row.sequence for key, row in rows.items()} == order, "records and order disagree"
        assert txn.stat(db=self.order)["entries"] == len(order), "a key stands twice in the order"
        assert counters.num_records == len(rows), f"ledger: {counters.num_records} of {len(rows)} records"
        recount = sum(row.charged_bytes for row in rows.values())
        assert counters.stored_bytes == recount, f"ledger: {counters.stored_bytes} bytes, recount {recount}"
        assert {key: row.tenant for key, row in rows.items()} == owners, "records and order disagree about tenants"
        of_tenants: Counter[bytes] = Counter()
        for row in rows.values():
            of_tenants[row.tenant] += row.charged_bytes
        of_tenants.pop(_NOBODY, None)
        assert self.bytes_of_tenants(txn) == of_tenants, "a tenant's bytes are miscounted"
        self._check_slots(txn, [row.slot for row in rows.values()], counters.slab_bytes)
        newest = max(order.values(), default=-1)
        assert newest < counters.next_sequence, f"sequence {newest} is not below {counters.next_sequence}"
        for row in rows.values():
            parent = rows.get(row.parent)
            is_safe = parent is None or parent.is_marked or parent.sequence > row.sequence
            assert is_safe, "a record would leave before the one that continues it"

    def _check_slots(self, txn: "lmdb.Transaction[bytes]", used: list[Slot], slab_bytes: int) -> None:
        """Every slot is a record's, free, or a hole."""
        free = [Slot(num_bytes, number) for num_bytes, _, number in map(_FREE.unpack, _keys(txn, self.free))]
        holes = [Slot(*_HOLE.unpack(packed)) for packed in _keys(txn, self.holes)]
        slots = used + free + holes
        assert len(set(slots)) == len(slots), "a slot is two things at once"
        there = {int.from_bytes(size, "big"): _SLOTS.unpack(packed)[0] for size, packed in txn.cursor(db=self.slabs)}
        assert all(number < there.get(num_bytes, 0) for num_bytes, number in slots), "a slot is used that is not there"
        assert len(slots) == sum(there.values()), "a slot is nobody's"
        taken = sum(slot.num_bytes for slot in used + free)
        assert taken == slab_bytes, f"ledger: {slab_bytes} bytes of slots, recount {taken}"

    def _used_bytes(self) -> int:
        return (self.env.info()["last_pgno"] + 1) * _PAGE_BYTES


class Change:
    """A write transaction under way: rows, payloads, order and accounts move together or not at all.

    The order of leaving is CLOCK. One rule keeps what stays prefix-closed: a parent is newer than its child, or it is
    marked. Whatever makes a record new marks its parent; so an unmarked oldest record has nothing that continues it,
    and of one tenant, who has all of a chain, neither has the oldest.
    """

    def __init__(self, tables: Tables, txn: "lmdb.Transaction[bytes]", synced_change: int | None) -> None:
        """Slots freed after *synced_change* must stay as they are: an accident would make them records again. None:
        after the change before this one."""
        self._tables = tables
        self._txn = txn
        self.counters = tables.counters(txn)
        self._usable_before = self.counters.num_changes if synced_change is None else synced_change
        self.counters.num_changes += 1
        self._num_written = 0
        self._tenants: dict[bytes, int] = {}  # charged bytes, of those that this change has looked at

    def mark(self, key: bytes) -> bool:
        """Let *key* be passed over once when room is made; False if it is not there."""
        packed = self._txn.get(key, db=self._tables.records) if key else None
        if packed is None:
            return False
        row = Row.unpack(packed)
        if not row.is_marked:
            self._txn.put(key, row._replace(is_marked=True).pack(), db=self._tables.records)
        return True

    def allocate(self, num_bytes: int, num_slots: int, limit_bytes: int) -> tuple[list[Slot], list[Slot]]:
        """Slots of that size to write to; and slots whose room must be punched out first, as all may take only
        *limit_bytes*. `lmdb.MapFullError` if they cannot be had."""
        numbers = [number for _, _, number in self._take_free(num_bytes, num_slots)]
        slots = [Slot(num_bytes, number) for number in numbers]
        missing = num_slots - len(slots)
        self.counters.slab_bytes += missing * num_bytes
        to_punch = self.give_back(limit_bytes) if missing else []
        if missing and self.counters.slab_bytes > limit_bytes:
            raise lmdb.MapFullError("no slot is free")
        return slots + self._new_slots(num_bytes, missing), to_punch

    def give_back(self, limit_bytes: int) -> list[Slot]:
        """Free slots whose room must be punched out, so that all take *limit_bytes* at most, as far as possible."""
        to_punch: list[Slot] = []
        while self.counters.slab_bytes > limit_bytes and (found := self._take_free(None, 1)):
            hole = Slot(found[0][0], found[0][2])
            to_punch.append(hole)
            self._txn.put(_HOLE.pack(*hole), b"", db=self._tables.holes)
            self.counters.slab_bytes -= hole.num_bytes
        return to_punch

    def add(self, sealed: Sealed, blob: Blob, slot: Slot, coming: Collection[bytes] = ()) -> None:
        """A *blob* whose key is not there is in *slot*: the newest. A parent that is *coming* needs no mark."""
        tenant = blob.tenant or _NOBODY
        self._append(sealed.key, Row(0, sealed.charged_bytes, False, tenant, slot, sealed.header, blob.parent), coming)
        self.counters.num_records += 1
        self.counters.stored_bytes += sealed.charged_bytes
        self._num_written += sealed.payload.nbytes
        self._charge(tenant, sealed.charged_bytes)

    def forget(self, key: bytes) -> bool:
        """Remove *key*; False if it is not there."""
        packed = self._txn.pop(key, db=self._tables.records)
        if packed is None:
            return False
        self._left(Row.unpack(packed))
        return True

    def evict(self, limit_bytes: int, max_records: int = sys.maxsize) -> list[bytes]:
        """Remove the oldest until no more than *limit_bytes* are stored, at most *max_records* of them.

        What is marked gets a second chance instead. Of these there are only so many in one change: look at
        `counters` for whether more changes are needed.
        """
        return self._turn(lambda: self.counters.stored_bytes > limit_bytes, max_records, None)

    def evict_tenant(self, tenant: bytes, limit_bytes: int) -> list[bytes]:
        """The same among the records of one tenant, until that has no more than *limit_bytes*."""
        return self._turn(lambda: self.bytes_of(tenant) > limit_bytes, sys.maxsize, tenant)

    def bytes_of(self, tenant: bytes) -> int:
        """What the tenant has, charged as in `Counters.stored_bytes`."""
        if tenant not in self._tenants:
            packed = self._txn.get(tenant, db=self._tables.tenants)
            self._tenants[tenant] = 0 if packed is None else _TENANT_BYTES_OF.unpack(packed)[0]
        return self._tenants[tenant]

    def leave_spare_pages(self) -> None:
        """Use as many pages as must be left and give them back; `lmdb.MapFullError` if they are not there.

        A deletion needs pages of its own: a map filled to the last page could never be emptied again.
        """
        spares = [b"spare" + bytes([number]) for number in range(_SPARE_PAGES)]
        for spare in spares:
            self._txn.put(spare, _SPARE_VALUE, db=self._tables.ledger)
        for spare in spares:
            self._txn.delete(spare, db=self._tables.ledger)

    def write_accounts(self) -> None:
        """The last act of every change."""
        if self._num_written:
            self.counters.wrote(self._num_written, time.time())
        self._txn.put(_COUNTERS_KEY, self.counters.pack(), db=self._tables.ledger)
        for tenant, num_bytes in self._tenants.items():
            if num_bytes:
                self._txn.put(tenant, _TENANT_BYTES_OF.pack(num_bytes), db=self._tables.tenants)
            else:
                self._txn.delete(tenant, db=self._tables.tenants)

    def _turn(self, is_too_much: Callable[[], bool], max_records: int, tenant: bytes | None) -> list[bytes]:
        """Go through the order, oldest first, of one *tenant* or of all."""
        evicted: list[bytes] = []
        num_chances = 0
        order = self._in_order(tenant)
        while len(evicted) < max_records and is_too_much():
            found = next(order, None)
            if found is None:
                raise lmdb.CorruptedError("the ledger counts what no record has")
            position, key = found
            if not key:
                raise lmdb.CorruptedError("a place in the order is nobody's")
            packed = self._txn.get(key, db=self._tables.records)
            if packed is None:  # `check` says so, and this must not spin
                self._txn.delete(position, db=self._tables.order)
                continue
            row = Row.unpack(packed)
            if not row.is_marked:
                self._txn.delete(key, db=self._tables.records)
                self._left(row)
                evicted.append(key)
            elif num_chances == _MOST_SECOND_CHANCES:
                break
            else:
                num_chances += 1
                self._txn.delete(position, db=self._tables.order)
                self._append(key, row._replace(is_marked=False))
        self.counters.evicted_total += len(evicted)
        return evicted

    def _in_order(self, tenant: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """Place and key of each record, or of each of a *tenant*, oldest first; the order may change meanwhile."""
        after = b""
        while True:
            with self._txn.cursor(db=self._tables.order) as cursor:
                rows = islice(cursor, _ROWS_AT_ONCE) if cursor.set_range(after) else iter(())
                page = list(rows)
            for place, owned in page:
                if place < after:  # we should never end
                    raise lmdb.CorruptedError("the order is out of order")
                after = place + b"\0"
                if tenant is None or owned.startswith(tenant):
                    yield place, owned[TENANT_BYTES:]
            if not page:
                return

    def _left(self, row: Row) -> None:
        """A record is gone: so go its place and its charge, and its slot is free."""
        self._txn.delete(_SEQUENCE.pack(row.sequence), db=self._tables.order)
        freed = _FREE.pack(row.slot.num_bytes, self.counters.num_changes, row.slot.number)
        self._txn.put(freed, b"", db=self._tables.free)
        self.counters.num_records -= 1
        self.counters.stored_bytes -= row.charged_bytes
        self._charge(row.tenant, -row.charged_bytes)

    def _take_free(self, num_bytes: int | None, most: int) -> list[tuple[int, int, int]]:
        """Up to *most* free slots of that size (None: of any) that may be written to, taken from the table."""
        found: list[tuple[int, int, int]] = []
        start = b"" if num_bytes is None else _FREE.pack(num_bytes, 0, 0)
        with self._txn.cursor(db=self._tables.free) as cursor:
            if cursor.set_range(start):
                for packed in cursor.iternext(values=False):
                    size, change, number = _FREE.unpack(packed)
                    if len(found) == most or (num_bytes is not None and size != num_bytes):
                        break
                    if change <= self._usable_before:
                        found.append((size, change, number))
                    elif num_bytes is not None:
                        break  # what follows was freed later still
        for slot in found:
            self._txn.delete(_FREE.pack(*slot), db=self._tables.free)
        return found

    def _new_slots(self, num_bytes: int, num_slots: int) -> list[Slot]:
        """Slots that take no room so far: holes, and then the end of the slab."""
        if not num_slots:
            return []
        with self._txn.cursor(db=self._tables.holes) as cursor:
            is_there = cursor.set_range(_HOLE.pack(num_bytes, 0))
            rows = islice(cursor.iternext(values=False), num_slots) if is_there else ()
            slots = [slot for packed in rows if (slot := Slot(*_HOLE.unpack(packed))).num_bytes == num_bytes]
        for slot in slots:
            self._txn.delete(_HOLE.pack(*slot), db=self._tables.holes)
        size = num_bytes.to_bytes(4, "big")
        packed = self._txn.get(size, db=self._tables.slabs)
        end = 0 if packed is None else _SLOTS.unpack(packed)[0]
        missing = num_slots - len(slots)
        self._txn.put(size, _SLOTS.pack(end + missing), db=self._tables.slabs)
        return slots + [Slot(num_bytes, number) for number in range(end, end + missing)]

    def _charge(self, tenant: bytes, num_bytes: int) -> None:
        if tenant != _NOBODY:
            self._tenants[tenant] = self.bytes_of(tenant) + num_bytes

    def _append(self, key: bytes, row: Row, coming: Collection[bytes] = ()) -> None:
        """Make *key* the newest."""
        sequence = self.counters.next_sequence
        self.counters.next_sequence += 1
        self._txn.put(key, row._replace(sequence=sequence).pack(), db=self._tables.records)
        if not self._txn.put(_SEQUENCE.pack(sequence), row.tenant + key, append=True, db=self._tables.order):
            raise lmdb.CorruptedError("the newest in the order is newer than all records")
        if row.parent and row.parent not in coming:
            self.mark(row.parent)


def _plausible(slot: Slot) -> Slot:
    """*slot*, if a file can have it: what follows from the row of a broken page is not even tried."""
    if slot.num_bytes == 0 or slot.num_bytes % _PAGE_BYTES or (slot.number + 1) * slot.num_bytes >> 62:
        raise lmdb.CorruptedError(f"no payload is in {slot}")
    return slot


def _keys(txn: "lmdb.Transaction[bytes]", db: "lmdb._Database") -> Iterator[bytes]:
    return txn.cursor(db=db).iternext(values=False)
