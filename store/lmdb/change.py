"""`Change`: the write transaction that changes all sub-databases of an LMDB store together."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice

import lmdb

from kvtier.store.blob_store import MAX_KEY_BYTES, TENANT_BYTES, Blob
from kvtier.store.codec.seal import Sealed
from kvtier.store.lmdb.index_file import SPARE_PAGES
from kvtier.store.lmdb.rows import (
    BYTES_OF_TENANT,
    COUNTERS_KEY,
    FREE,
    HOLE,
    NO_TENANT,
    SEQUENCE,
    SLOTS,
    Row,
    checksum,
    verified,
)
from kvtier.store.lmdb.tables import Tables, ascending
from kvtier.store.slab import PAGE_BYTES, Slot

# What a change that only removes may do, and the new pages that it may need for that: 3 for an eviction, 4 for a second
# chance (the record's parent is marked), 3 for a hole, 64 for branches and the ledger.
MOST_EVICTED = 320
MOST_SECOND_CHANCES = 160
_MOST_HOLES = 128
REMOVAL_BYTES = 8 << 20
_SPARE_VALUE = bytes(PAGE_BYTES // 2)  # LMDB gives it a page of its own
_ROWS_AT_ONCE = 16


class NoFreeSlot(Exception):
    """No slot of the wanted size may be written to, and a new one would exceed the limit of the slabs."""


class Change:
    """A write transaction under way: rows, payloads, order and accounts move together or not at all.

    Records are evicted by CLOCK. One rule keeps the records that stay prefix-closed: a parent is newer than its child,
    or it is marked. Each step that makes a record the newest marks its parent; so no record continues the oldest one
    that is unmarked. The same holds among the records of one tenant, as all of a chain belongs to one tenant.
    """

    def __init__(
        self, tables: Tables, txn: "lmdb.Transaction[bytes]", synced_change: int | None, num_chances: int
    ) -> None:
        """Begin a change of *tables* in the write transaction *txn*, which may give *num_chances* second chances.

        Slots freed after *synced_change* are not written to: after an accident they would be records again. None:
        slots freed before this change may be written to.
        """
        self._tables = tables
        self._txn = txn
        self.counters = tables.counters(txn)
        self._usable_before = self.counters.num_changes if synced_change is None else synced_change
        self.counters.num_changes += 1
        self._num_chances_left = num_chances
        self._num_written = 0
        self._tenants: dict[bytes, int] = {}  # charged bytes, of the tenants that this change has looked at

    def mark(self, key: bytes) -> bool:
        """Have eviction pass over *key* once; False if it has no record."""
        packed = self._txn.get(key, db=self._tables.records) if 0 < len(key) <= MAX_KEY_BYTES else None
        if packed is None:
            return False
        row = Row.unpack(key, packed)
        if not row.is_marked:
            self._txn.put(key, row._replace(is_marked=True).pack(key), db=self._tables.records)
        return True

    def allocate(self, num_bytes: int, num_slots: int, limit_bytes: int) -> tuple[list[Slot], list[Slot]]:
        """Allocate *num_slots* slots of *num_bytes*; also returns slots whose disk space must be punched out first.

        That keeps all slots within *limit_bytes*. `NoFreeSlot` if there are not enough.
        """
        numbers = [number for _, _, number in self._take_free(num_bytes, num_slots)]
        slots = [Slot(num_bytes, number) for number in numbers]
        missing = num_slots - len(slots)
        self.counters.slab_bytes += missing * num_bytes
        to_punch = self.give_back(limit_bytes) if missing else []
        if missing and self.counters.slab_bytes > limit_bytes:
            raise NoFreeSlot
        return slots + self._new_slots(num_bytes, missing), to_punch

    def give_back(self, limit_bytes: int, most: int = _MOST_HOLES) -> list[Slot]:
        """Make holes of free slots until all slots take *limit_bytes* at most, and return these: the caller punches out
        their disk space.

        At most *most* of them. There may be too few.
        """
        to_punch: list[Slot] = []
        excess_bytes = self.counters.slab_bytes - limit_bytes
        found: list[bytes] = []
        with self._txn.cursor(db=self._tables.free) as cursor:
            for key, row in ascending(cursor):
                if len(to_punch) == most or excess_bytes <= 0:
                    break
                num_bytes, change, number = FREE.unpack_key(key, row)
                if change <= self._usable_before:
                    found.append(key)
                    to_punch.append(Slot(num_bytes, number))
                    excess_bytes -= num_bytes
        for key, slot in zip(found, to_punch, strict=True):
            self._txn.delete(key, db=self._tables.free)
            hole = HOLE.pack(*slot)
            self._txn.put(hole, checksum(hole), db=self._tables.holes)
            self.counters.slab_bytes -= slot.num_bytes
        return to_punch

    def add(self, sealed: Sealed, blob: Blob, slot: Slot, coming: Collection[bytes] = ()) -> None:
        """Add the record of *blob*, a new key whose value is in *slot*, as the newest.

        *coming* are keys that this change adds later: as parents they will be newer, and need no mark.
        """
        tenant = blob.tenant or NO_TENANT
        self._append(sealed.key, Row(0, sealed.charged_bytes, False, tenant, slot, sealed.header, blob.parent), coming)
        self.counters.num_records += 1
        self.counters.stored_bytes += sealed.charged_bytes
        self._num_written += sealed.payload.nbytes
        self._charge(tenant, sealed.charged_bytes)

    def find_again(self, keys: Iterable[bytes]) -> None:
        """Raise `lmdb.CorruptedError` if one of *keys*, which were added, is not found where a reader looks.

        A damaged page that leads readers elsewhere makes sense to LMDB, and no other check would find it.
        """
        if not all(self._txn.get(key, db=self._tables.records) for key in keys):
            raise lmdb.CorruptedError("a new record is not found again")

    def forget(self, key: bytes) -> bool:
        """Delete the record of *key*; False if there is none."""
        packed = self._txn.pop(key, db=self._tables.records) if 0 < len(key) <= MAX_KEY_BYTES else None
        if packed is None:
            return False
        self._on_removed(Row.unpack(key, packed))
        return True

    def evict(self, limit_bytes: int, most: int) -> list[bytes]:
        """Evict the oldest records until at most *limit_bytes* are stored, *most* records at most; returns their keys.

        A marked record gets a second chance instead. One change gives a limited number of those, so look at `counters`
        for whether another change is needed.
        """
        evicted = self._turn(lambda: self.counters.stored_bytes > limit_bytes, most, NO_TENANT)
        self.counters.evicted_total += len(evicted)
        return evicted

    def evict_tenant(self, tenant: bytes, limit_bytes: int, most: int) -> list[bytes]:
        """As `evict`, among the records of *tenant*, until that has at most *limit_bytes*."""
        evicted = self._turn(lambda: self.bytes_of(tenant) > limit_bytes, most, tenant)
        self.counters.evicted_total += len(evicted)
        self.counters.quota_evicted_total += len(evicted)
        return evicted

    def clear(self, num_bytes: int, most: int, tenant: bytes = NO_TENANT) -> tuple[list[bytes], int]:
        """Evict the oldest records of *tenant*, or of all, until *num_bytes* less are stored; they do not count as
        evicted, as that was asked for. Their keys, and how many bytes are left. Second chances as of `evict`."""

        def stored_bytes() -> int:
            return self.counters.stored_bytes if tenant == NO_TENANT else self.bytes_of(tenant)

        limit_bytes = max(0, stored_bytes() - num_bytes)
        return self._turn(lambda: stored_bytes() > limit_bytes, most, tenant), stored_bytes()

    def bytes_of(self, tenant: bytes) -> int:
        """Bytes that the records of *tenant* are charged, as in `Counters.stored_bytes`."""
        if tenant not in self._tenants:
            packed = self._txn.get(tenant, db=self._tables.tenants)
            self._tenants[tenant] = 0 if packed is None else BYTES_OF_TENANT.unpack(tenant, packed)[0]
        return self._tenants[tenant]

    def leave_spare_pages(self) -> None:
        """Take as many pages as must be left free and give them back; `lmdb.MapFullError` if there are too few.

        A deletion needs pages of its own: a map filled to the last page could never be emptied again.
        """
        spares = [b"spare" + bytes([number]) for number in range(SPARE_PAGES)]
        for spare in spares:
            self._txn.put(spare, _SPARE_VALUE, db=self._tables.ledger)
        for spare in spares:
            self._txn.delete(spare, db=self._tables.ledger)

    def write_accounts(self) -> None:
        """Write the ledger and the tenants' bytes: the last step of every change."""
        if self._num_written:
            self.counters.on_written(self._num_written, time.time())
        self._txn.put(COUNTERS_KEY, self.counters.pack(), db=self._tables.ledger)
        for tenant, num_bytes in self._tenants.items():
            if num_bytes:
                self._txn.put(tenant, BYTES_OF_TENANT.pack(tenant, num_bytes), db=self._tables.tenants)
            else:
                self._txn.delete(tenant, db=self._tables.tenants)

    def _turn(self, is_too_much: Callable[[], bool], most: int, tenant: bytes) -> list[bytes]:
        """Evict by CLOCK, oldest first, among the records of *tenant*, or of all for NO_TENANT, while *is_too_much*."""
        evicted: list[bytes] = []
        order = self._in_order(tenant)
        while len(evicted) < most and is_too_much():
            found = next(order, None)
            if found is None:
                raise lmdb.CorruptedError("the ledger counts bytes that no record has")
            position, owner, key = found
            if not key:
                raise lmdb.CorruptedError("a place in the order has no key")
            packed = self._txn.get(key, db=self._tables.records)
            row = None if packed is None else Row.unpack(key, packed)
            if row is None or (SEQUENCE.pack(row.sequence), row.tenant) != (position, owner):
                raise lmdb.CorruptedError("a place in the order belongs to another record")
            if not row.is_marked:
                self._txn.delete(key, db=self._tables.records)
                self._on_removed(row)
                evicted.append(key)
            elif not self._num_chances_left:
                break
            else:
                self._num_chances_left -= 1
                self._leave_place(position, owner)
                self._append(key, row._replace(is_marked=False))
        return evicted

    def _in_order(self, tenant: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Place, tenant and key of each record of *tenant*, or of all for NO_TENANT, oldest first.

        The caller may move or delete records meanwhile.
        """
        is_all = tenant == NO_TENANT
        db = self._tables.order if is_all else self._tables.owned
        after = b"" if is_all else tenant
        while True:
            with self._txn.cursor(db=db) as cursor:
                rows = islice(cursor, _ROWS_AT_ONCE) if cursor.set_range(after) else iter(())
                page = [(place, found) for place, found in ascending(rows, after) if is_all or place.startswith(tenant)]
            for place, found in page:
                after = place + b"\0"
                if is_all:
                    owned = verified(place, found)
                    yield place, owned[:TENANT_BYTES], owned[TENANT_BYTES:]
                else:
                    yield place[TENANT_BYTES:], tenant, found
            if not page:
                return

    def _leave_place(self, position: bytes, owner: bytes) -> None:
        self._txn.delete(position, db=self._tables.order)
        if owner != NO_TENANT:
            self._txn.delete(owner + position, db=self._tables.owned)

    def _on_removed(self, row: Row) -> None:
        """The record of *row* was deleted: remove its place in the order and its charge, and free its slot."""
        self._leave_place(SEQUENCE.pack(row.sequence), row.tenant)
        freed = FREE.pack(row.slot.num_bytes, self.counters.num_changes, row.slot.number)
        self._txn.put(freed, checksum(freed), db=self._tables.free)
        self.counters.num_records -= 1
        self.counters.stored_bytes -= row.charged_bytes
        self._charge(row.tenant, -row.charged_bytes)

    def _take_free(self, num_bytes: int | None, most: int) -> list[tuple[int, int, int]]:
        """Take up to *most* free slots of *num_bytes* (None: of any size) that may be written to out of the table."""
        found: list[tuple[int, int, int]] = []
        start = b"" if num_bytes is None else FREE.pack(num_bytes, 0, 0)
        with self._txn.cursor(db=self._tables.free) as cursor:
            if cursor.set_range(start):
                for key, row in ascending(cursor):
                    size, change, number = FREE.unpack_key(key, row)
                    if len(found) == most or (num_bytes is not None and size != num_bytes):
                        break
                    if change <= self._usable_before:
                        found.append((size, change, number))
                    elif num_bytes is not None:
                        break  # the next ones were freed later still
        for slot in found:
            self._txn.delete(FREE.pack(*slot), db=self._tables.free)
        return found

    def _new_slots(self, num_bytes: int, num_slots: int) -> list[Slot]:
        """Take slots that have no disk space so far: holes, and then new ones at the end of the slab."""
        if not num_slots:
            return []
        with self._txn.cursor(db=self._tables.holes) as cursor:
            is_there = cursor.set_range(HOLE.pack(num_bytes, 0))
            rows = islice(ascending(cursor), num_slots) if is_there else ()
            slots = [slot for row in rows if (slot := Slot(*HOLE.unpack_key(*row))).num_bytes == num_bytes]
        for slot in slots:
            self._txn.delete(HOLE.pack(*slot), db=self._tables.holes)
        size = num_bytes.to_bytes(4, "big")
        packed = self._txn.get(size, db=self._tables.slabs)
        end = 0 if packed is None else SLOTS.unpack(size, packed)[0]
        missing = num_slots - len(slots)
        self._txn.put(size, SLOTS.pack(size, end + missing), db=self._tables.slabs)
        return slots + [Slot(num_bytes, number) for number in range(end, end + missing)]

    def _charge(self, tenant: bytes, num_bytes: int) -> None:
        if tenant != NO_TENANT:
            self._tenants[tenant] = self.bytes_of(tenant) + num_bytes

    def _append(self, key: bytes, row: Row, coming: Collection[bytes] = ()) -> None:
        """Write the record of *key* as the newest, and mark its parent unless that is *coming*."""
        sequence = self.counters.next_sequence
        self.counters.next_sequence += 1
        self._txn.put(key, row._replace(sequence=sequence).pack(key), db=self._tables.records)
        place, owned = SEQUENCE.pack(sequence), row.tenant + key
        if not self._txn.put(place, owned + checksum(place, owned), append=True, db=self._tables.order):
            raise lmdb.CorruptedError("the newest in the order is newer than all records")
        if row.tenant != NO_TENANT:
            self._txn.put(row.tenant + place, key, db=self._tables.owned)
        if row.parent and row.parent not in coming:
            self.mark(row.parent)
