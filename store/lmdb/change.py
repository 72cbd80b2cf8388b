"""`Change`: a write transaction on all sub-databases of an LMDB store together."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice

import lmdb

from kvtier.store.blob_store import MAX_KEY_BYTES, TENANT_BYTES, Blob
from kvtier.store.codec.seal import Sealed
from kvtier.store.lmdb.tables import (
    BYTES_OF_TENANT,
    COUNTERS_KEY,
    FREE,
    HOLE,
    NO_TENANT,
    SEQUENCE,
    SLOTS,
    SPARE_PAGES,
    RecordRow,
    Tables,
    ascending,
    checksum,
    verified,
)
from kvtier.store.slab import PAGE_BYTES, Slot

# The limits of one change that only removes records, and the bytes of new LMDB pages that it may need. An eviction may
# need 3 pages. A second chance (a marked record becomes the newest, and its parent is marked) may need 4. A hole (a
# free slot whose disk space is released) may need 3. Branch pages and the ledger (the row of counters) may need 64.
MAX_EVICTED = 320
MAX_SECOND_CHANCES = 160
_MAX_HOLES = 128
REMOVAL_BYTES = 8 << 20
_SPARE_VALUE = bytes(PAGE_BYTES // 2)  # LMDB gives it a page of its own
_ROWS_AT_ONCE = 16


class NoFreeSlot(Exception):
    """Error raised if no free slot of the wanted size can be reused, and a new slot would take too much disk space."""


class Change:
    """A write transaction on the index. Records, slots, eviction order and counters change together or not at all.

    Records are evicted by CLOCK: the oldest record is evicted unless it is marked as recently used. A marked record
    gets a second chance: it loses its mark and becomes the newest.

    No record is evicted before its children, because a parent is always newer than its child, or marked. To keep this
    true, each step that makes a record the newest also marks its parent. So an unmarked record that is
    the oldest has no child. The same holds among the records of one tenant, because all blocks of a chain belong to one
    tenant.
    """

    def __init__(
        self, tables: Tables, txn: "lmdb.Transaction[bytes]", synced_change: int | None, num_chances: int
    ) -> None:
        """Begin a change of *tables* in the write transaction *txn*.

        Args:
            tables: Sub-databases of the store.
            txn: Write transaction, which the caller commits or aborts.
            synced_change: Number of the last change in the last checkpoint. Slots (places for payloads) that later
                changes freed are not reused: after a machine crash the store returns to the checkpoint, in which these
                slots hold records. None for a store without checkpoints; it may reuse all slots freed before.
            num_chances: Maximum number of records that evictions may skip because they are marked as recently used.
        """
        self._tables = tables
        self._txn = txn
        self.counters = tables.counters(txn)
        self._usable_before = self.counters.num_changes if synced_change is None else synced_change
        self.counters.num_changes += 1
        self._num_chances_left = num_chances
        self._num_written = 0
        self._tenants: dict[bytes, int] = {}  # charged bytes of the tenants that this change has looked up

    def mark(self, key: bytes) -> bool:
        """Mark the record of *key*, so that eviction skips it once. Returns False if there is no record."""
        packed = self._txn.get(key, db=self._tables.records) if 0 < len(key) <= MAX_KEY_BYTES else None
        if packed is None:
            return False
        row = RecordRow.unpack(key, packed)
        if not row.is_marked:
            self._txn.put(key, row._replace(is_marked=True).pack(key), db=self._tables.records)
        return True

    def allocate(self, num_bytes: int, num_slots: int, limit_bytes: int) -> tuple[list[Slot], list[Slot]]:
        """Allocate *num_slots* slots of *num_bytes*. All slots together may take at most *limit_bytes* on disk.

        Returns two lists: the allocated slots, and free slots that were turned into holes (see `give_back`) to stay
        within the limit. The caller must release the disk space of the holes (punch them) before it writes to the
        allocated slots. Raises `NoFreeSlot` if there are not enough slots.
        """
        numbers = [number for _, _, number in self._take_free(num_bytes, num_slots)]
        slots = [Slot(num_bytes, number) for number in numbers]
        missing = num_slots - len(slots)
        self.counters.slab_bytes += missing * num_bytes
        to_punch: list[Slot] = []
        if missing and self.counters.slab_bytes > limit_bytes:
            to_punch = self.give_back(limit_bytes)
            if self.counters.slab_bytes > limit_bytes:
                raise NoFreeSlot
        return slots + self._new_slots(num_bytes, missing), to_punch

    def give_back(self, limit_bytes: int, limit: int = _MAX_HOLES) -> list[Slot]:
        """Turn free slots into holes (slots without disk space) until all slots take at most *limit_bytes* on disk.

        Returns the new holes, whose disk space the caller must release. The slots may still take more than
        *limit_bytes*: at most *limit* holes are made, and slots whose records a crash may bring back are left alone.
        """
        to_punch: list[Slot] = []
        excess_bytes = self.counters.slab_bytes - limit_bytes
        found: list[bytes] = []
        with self._txn.cursor(db=self._tables.free) as cursor:
            for key, row in ascending(cursor):
                if len(to_punch) == limit or excess_bytes <= 0:
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
        """Add a record for *blob*, whose value is in *slot*, as the newest record. Its key must be new.

        The record of the parent block is marked as recently used, so that it is not evicted before this record. It is
        not marked if this change adds it later (its key is in *coming*): then it will be newer than this record anyway.
        """
        tenant = blob.tenant or NO_TENANT
        self._append(
            sealed.key, RecordRow(0, sealed.charged_bytes, False, tenant, slot, sealed.header, blob.parent), coming
        )
        self.counters.num_records += 1
        self.counters.stored_bytes += sealed.charged_bytes
        self._num_written += sealed.payload.nbytes
        self._charge(tenant, sealed.charged_bytes)

    def verify_lookups(self, keys: Iterable[bytes]) -> None:
        """Raise `lmdb.CorruptedError` if a lookup does not find one of *keys*, which this change has added.

        A damaged page that leads lookups to the wrong page may look valid to LMDB. No other check would find it.
        """
        if not all(self._txn.get(key, db=self._tables.records) for key in keys):
            raise lmdb.CorruptedError("a record that was just added is not found")

    def forget(self, key: bytes) -> bool:
        """Delete the record of *key*. Returns False if there is none."""
        packed = self._txn.pop(key, db=self._tables.records) if 0 < len(key) <= MAX_KEY_BYTES else None
        if packed is None:
            return False
        self._on_removed(RecordRow.unpack(key, packed))
        return True

    def evict(self, limit_bytes: int, limit: int) -> list[bytes]:
        """Evict the oldest records until at most *limit_bytes* are stored, and return their keys.

        Evicts at most *limit* records. A record that is marked as recently used is skipped: it loses the mark and
        becomes the newest. One change may skip only a limited number of records, so check `counters` to see whether
        another change is needed.
        """
        evicted = self._turn(lambda: self.counters.stored_bytes > limit_bytes, limit, NO_TENANT)
        self.counters.evicted_total += len(evicted)
        return evicted

    def evict_tenant(self, tenant: bytes, limit_bytes: int, limit: int) -> list[bytes]:
        """Evict the oldest records of *tenant* until it has at most *limit_bytes* stored, and return the evicted keys.

        Evicts at most *limit* records, and skips records that are marked as recently used, as `evict` does.
        """
        evicted = self._turn(lambda: self.bytes_of(tenant) > limit_bytes, limit, tenant)
        self.counters.evicted_total += len(evicted)
        self.counters.quota_evicted_total += len(evicted)
        return evicted

    def clear(self, num_bytes: int, limit: int, tenant: bytes = NO_TENANT) -> tuple[list[bytes], int]:
        """Evict the oldest records of *tenant* (NO_TENANT: of all) to free *num_bytes* of the capacity.

        Returns the evicted keys, and how many bytes are still stored. Skips records that are marked as recently used.
        The counter `evicted_total` excludes these evictions, because a user requested them.
        """

        def stored_bytes() -> int:
            return self.counters.stored_bytes if tenant == NO_TENANT else self.bytes_of(tenant)

        limit_bytes = max(0, stored_bytes() - num_bytes)
        return self._turn(lambda: stored_bytes() > limit_bytes, limit, tenant), stored_bytes()

    def bytes_of(self, tenant: bytes) -> int:
        """Return how many bytes of the capacity the records of *tenant* take."""
        if tenant not in self._tenants:
            packed = self._txn.get(tenant, db=self._tables.tenants)
            self._tenants[tenant] = 0 if packed is None else BYTES_OF_TENANT.unpack(tenant, packed)[0]
        return self._tenants[tenant]

    def check_spare_pages(self) -> None:
        """Raise `lmdb.MapFullError` if the map has too few free pages for a deletion.

        A deletion needs new pages itself, so a completely full map could never be emptied again. This method allocates
        the pages and frees them again, because LMDB does not say how many pages are free.
        """
        spares = [b"spare" + bytes([number]) for number in range(SPARE_PAGES)]
        for spare in spares:
            self._txn.put(spare, _SPARE_VALUE, db=self._tables.ledger)
        for spare in spares:
            self._txn.delete(spare, db=self._tables.ledger)

    def write_accounts(self) -> None:
        """Write the counters and the tenants' byte counts. This must be the last step of every change."""
        if self._num_written:
            self.counters.on_written(self._num_written, time.time())
        self._txn.put(COUNTERS_KEY, self.counters.pack(), db=self._tables.ledger)
        for tenant, num_bytes in self._tenants.items():
            if num_bytes:
                self._txn.put(tenant, BYTES_OF_TENANT.pack(tenant, num_bytes), db=self._tables.tenants)
            else:
                self._txn.delete(tenant, db=self._tables.tenants)

    def _turn(self, is_too_much: Callable[[], bool], limit: int, tenant: bytes) -> list[bytes]:
        """Evict up to *limit* records of *tenant* (NO_TENANT: of all) by CLOCK while *is_too_much* returns True."""
        evicted: list[bytes] = []
        order = self._in_order(tenant)
        while len(evicted) < limit and is_too_much():
            found = next(order, None)
            if found is None:
                raise lmdb.CorruptedError("the counters claim more stored bytes than all records have")
            position, owner, key = found
            if not key:
                raise lmdb.CorruptedError("an entry of the eviction order has no key")
            packed = self._txn.get(key, db=self._tables.records)
            row = None if packed is None else RecordRow.unpack(key, packed)
            if row is None or (SEQUENCE.pack(row.sequence), row.tenant) != (position, owner):
                raise lmdb.CorruptedError("an entry of the eviction order does not match its record")
            if not row.is_marked:
                self._txn.delete(key, db=self._tables.records)
                self._on_removed(row)
                evicted.append(key)
            elif not self._num_chances_left:  # this transaction may skip no more marked records
                break
            else:
                self._num_chances_left -= 1
                self._leave_place(position, owner)
                self._append(key, row._replace(is_marked=False))
        return evicted

    def _in_order(self, tenant: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Yield position, tenant and key of each record of *tenant* (NO_TENANT: of all), oldest first.

        The caller may move or delete records during the iteration.
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

    def _on_removed(self, row: RecordRow) -> None:
        """Remove a deleted record from the eviction order and from the counters, and free its slot."""
        self._leave_place(SEQUENCE.pack(row.sequence), row.tenant)
        freed = FREE.pack(row.slot.num_bytes, self.counters.num_changes, row.slot.number)
        self._txn.put(freed, checksum(freed), db=self._tables.free)
        self.counters.num_records -= 1
        self.counters.stored_bytes -= row.charged_bytes
        self._charge(row.tenant, -row.charged_bytes)

    def _take_free(self, num_bytes: int | None, limit: int) -> list[tuple[int, int, int]]:
        """Remove up to *limit* reusable slots of *num_bytes* (None: of any size) from the table of free slots.

        Returns for each slot its size, the number of the change that freed it, and its own number.
        """
        found: list[tuple[int, int, int]] = []
        start = b"" if num_bytes is None else FREE.pack(num_bytes, 0, 0)
        with self._txn.cursor(db=self._tables.free) as cursor:
            if cursor.set_range(start):
                for key, row in ascending(cursor):
                    size, change, number = FREE.unpack_key(key, row)
                    if len(found) == limit or (num_bytes is not None and size != num_bytes):
                        break
                    if change <= self._usable_before:
                        found.append((size, change, number))
                    elif num_bytes is not None:
                        break  # all further slots of this size were freed later still
        for slot in found:
            self._txn.delete(FREE.pack(*slot), db=self._tables.free)
        return found

    def _new_slots(self, num_bytes: int, num_slots: int) -> list[Slot]:
        if not num_slots:
            return []
        # First reuse holes (free slots without disk space), then add slots at the end of the slab file.
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

    def _append(self, key: bytes, row: RecordRow, coming: Collection[bytes] = ()) -> None:
        """Write a record to the index, at the end of the eviction order, and mark its parent as recently used."""
        sequence = self.counters.next_sequence
        self.counters.next_sequence += 1
        self._txn.put(key, row._replace(sequence=sequence).pack(key), db=self._tables.records)
        place, owned = SEQUENCE.pack(sequence), row.tenant + key
        if not self._txn.put(place, owned + checksum(place, owned), append=True, db=self._tables.order):
            raise lmdb.CorruptedError("the eviction order has an entry that is newer than all records")
        if row.tenant != NO_TENANT:
            self._txn.put(row.tenant + place, key, db=self._tables.owned)
        if row.parent and row.parent not in coming:
            self.mark(row.parent)
