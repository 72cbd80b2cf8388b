"""`Change`: a write transaction on all sub-databases of an LMDB store together."""

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import islice

import lmdb
import xxhash

from kvtier.store.blob_store import MAX_KEY_BYTES, TENANT_BYTES, Blob
from kvtier.store.codec.seal import Sealed
from kvtier.store.lmdb.reserved_slots import ReservedSlot
from kvtier.store.lmdb.tables import (
    BYTES_OF_TENANT,
    COUNTERS_KEY,
    FREE,
    HOLE,
    NO_TENANT,
    SEQUENCE,
    SLOTS,
    SPARE_PAGES,
    Counters,
    OldRow,
    RecordRow,
    Tables,
    ascending,
    check_ascending,
    checksum,
    free_row,
    free_rows,
    packed_row,
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
_MIN_ROWS, _MAX_ROWS = 8, 256  # limits on how many records an eviction reads at once


def last_usable(counters: Counters, synced_change: int | None) -> int:
    """Return the number of the last change whose freed slots may be reused, see `Change`."""
    return counters.num_changes if synced_change is None else synced_change


NewRecord = tuple[Sealed, Blob, Slot]
"""A record to add: the block as it is stored, the block itself, and the slot that has the payload.

Not a class, because a change adds hundreds.
"""


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
        self,
        tables: Tables,
        txn: "lmdb.Transaction[bytes]",
        synced_change: int | None,
        num_chances: int,
        reserved: Container[Slot] = (),
    ) -> None:
        """Begin a change of *tables* in the write transaction *txn*.

        Args:
            tables: Sub-databases of the store.
            txn: Write transaction, which the caller commits or aborts.
            synced_change: Number of the last change in the last checkpoint. Slots (places for payloads) that later
                changes freed are not reused: after a machine crash the store returns to the checkpoint, in which these
                slots hold records. None for a store without checkpoints; it may reuse all slots freed before.
            num_chances: Maximum number of records that evictions may skip because they are marked as recently used.
            reserved: Slots that puts may be writing to, and whose disk space is not released.
        """
        self._tables = tables
        self._txn = txn
        self._reserved = reserved
        self.counters = tables.counters(txn)
        self._usable_before = last_usable(self.counters, synced_change)
        self.counters.num_changes += 1
        self._num_chances_left = num_chances
        self._num_written = 0
        self._freed: defaultdict[int, list[int]] = defaultdict(list)  # numbers of the freed slots, by slot size
        self._tenants: dict[bytes, int] = {}  # charged bytes of the tenants that this change has looked up

    def mark(self, keys: Iterable[bytes]) -> set[bytes]:
        """Mark the records of *keys*, so that eviction skips each of them once. Return the keys that have a record."""
        rows = self._rows_of(keys)
        for key, row in rows.items():
            if not row.is_marked:
                self._txn.put(key, row._replace(is_marked=True).pack(key), db=self._tables.records)
        return set(rows)

    def take(self, slots: Iterable[ReservedSlot]) -> None:
        """Take *slots* for records that this change adds. The reserved slots are not free any more.

        A slot that lies beyond the end of its slab makes the slab longer. Slots between the old end and the new one,
        which other puts have reserved, become holes until they are taken.
        """
        freed: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        new: list[Slot] = []
        for slot, freed_by in slots:
            if freed_by is None:
                new.append(slot)
            else:
                freed[slot.num_bytes, freed_by].add(slot.number)
        for (num_bytes, change), numbers in freed.items():
            self._take_free(num_bytes, change, numbers)
        for slot in sorted(new):
            self.counters.slab_bytes += slot.num_bytes
            end = self._end_of(slot.num_bytes)
            if slot.number < end:
                if not self._txn.delete(HOLE.pack(*slot), db=self._tables.holes):
                    raise lmdb.CorruptedError("a reserved slot is not listed as a hole")
                continue
            for number in range(end, slot.number):
                self._add_hole(Slot(slot.num_bytes, number))
            size = slot.num_bytes.to_bytes(4, "big")
            self._txn.put(size, SLOTS.pack(size, slot.number + 1), db=self._tables.slabs)

    def give_back(self, limit_bytes: int, limit: int = _MAX_HOLES) -> list[Slot]:
        """Turn free slots into holes (slots without disk space) until all slots take at most *limit_bytes* on disk.

        Returns the new holes, whose disk space the caller must release. The slots may still take more than
        *limit_bytes*: at most *limit* holes are made. Slots whose records a crash may bring back are left alone, and so
        are slots that puts have reserved.
        """
        to_punch: list[Slot] = []
        excess_bytes = self.counters.slab_bytes - limit_bytes
        found: dict[tuple[int, int], set[int]] = {}
        with self._txn.cursor(db=self._tables.free) as cursor:
            for key, row in ascending(cursor):
                if len(to_punch) >= limit or excess_bytes <= 0:
                    break
                num_bytes, change, numbers = free_row(key, row)
                if change <= self._usable_before:
                    unused = (Slot(num_bytes, number) for number in numbers)
                    num_wanted = min(limit - len(to_punch), -(-excess_bytes // num_bytes))
                    some = list(islice((slot for slot in unused if slot not in self._reserved), num_wanted))
                    found.setdefault((num_bytes, change), set()).update(slot.number for slot in some)
                    to_punch += some
                    excess_bytes -= num_bytes * len(some)
        for (num_bytes, change), gone in found.items():
            self._take_free(num_bytes, change, gone)
        for slot in to_punch:
            self._add_hole(slot)
            self.counters.slab_bytes -= slot.num_bytes
        return to_punch

    def add(self, records: Sequence[NewRecord]) -> None:
        """Add *records* as the newest ones, the last one as the newest of all. Their keys must be new.

        The record of a parent block is marked as recently used, so that it is not evicted before its child. It is not
        marked if it comes later in *records*: then it is newer than the child anyway.
        """
        index = {sealed.key: i for i, (sealed, _, _) in enumerate(records)}
        parents: set[bytes] = set()
        marked: set[bytes] = set()
        for i, (_, blob, _) in enumerate(records):
            if blob.parent:
                place_of_parent = index.get(blob.parent)
                if place_of_parent is None:
                    parents.add(blob.parent)
                elif place_of_parent <= i:
                    marked.add(blob.parent)
        self.mark(parents)

        counters, digest_of = self.counters, xxhash.xxh3_64_digest
        rows: list[tuple[bytes, bytes]] = []
        places: list[tuple[bytes, bytes]] = []
        owned: list[tuple[bytes, bytes]] = []
        for sequence, (sealed, blob, slot) in enumerate(records, counters.next_sequence):
            key, header, payload, charged_bytes = sealed
            tenant, place = blob.tenant or NO_TENANT, SEQUENCE.pack(sequence)
            row = packed_row(key, sequence, charged_bytes, key in marked, tenant, slot, header, blob.parent)
            rows.append((key, row))
            entry = tenant + key
            places.append((place, entry + digest_of(place + entry)))  # as `_place_row` does
            if tenant != NO_TENANT:
                owned.append((tenant + place, key))
                self._charge(tenant, charged_bytes)
            counters.stored_bytes += charged_bytes
            self._num_written += payload.nbytes
        counters.next_sequence += len(rows)
        counters.num_records += len(rows)
        rows.sort()
        self._put_all(self._tables.records, rows)
        if owned:
            self._put_all(self._tables.owned, owned)
        with self._txn.cursor(db=self._tables.order) as cursor:
            _, num_added = cursor.putmulti(places, append=True)
        if num_added != len(places):
            raise lmdb.CorruptedError("the eviction order has an entry that is newer than all records")

    def verify_lookups(self, keys: Iterable[bytes]) -> None:
        """Raise `lmdb.CorruptedError` if a lookup does not find one of *keys*, which this change has added.

        A damaged page that leads lookups to the wrong page may look valid to LMDB. No other check would find it.
        """
        wanted = sorted(keys)
        with self._txn.cursor(db=self._tables.records) as cursor:
            found = [key for key, _ in cursor.getmulti(wanted)]
        if found != wanted:
            raise lmdb.CorruptedError("a record that was just added is not found")

    def forget(self, key: bytes) -> bool:
        """Delete the record of *key*. Returns False if there is none."""
        rows = self._rows_of([key])
        self._drop(
            {
                key: (
                    SEQUENCE.pack(row.sequence),
                    row.tenant,
                    OldRow(row.charged_bytes, row.is_marked, *row.slot),
                )
                for key, row in rows.items()
            }
        )
        return bool(rows)

    def evict(self, limit_bytes: int, limit: int) -> list[bytes]:
        """Evict the oldest records until at most *limit_bytes* are stored, and return their keys.

        Evicts at most *limit* records. A record that is marked as recently used is skipped: it loses the mark and
        becomes the newest. One change may skip only a limited number of records, so check `counters` to see whether
        another change is needed.
        """
        evicted = self._turn(lambda: self.counters.stored_bytes - limit_bytes, limit, NO_TENANT)
        self.counters.evicted_total += len(evicted)
        return evicted

    def evict_tenant(self, tenant: bytes, limit_bytes: int, limit: int) -> list[bytes]:
        """Evict the oldest records of *tenant* until it has at most *limit_bytes* stored, and return the evicted keys.

        Evicts at most *limit* records, and skips records that are marked as recently used, as `evict` does.
        """
        evicted = self._turn(lambda: self.bytes_of(tenant) - limit_bytes, limit, tenant)
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
        return self._turn(lambda: stored_bytes() - limit_bytes, limit, tenant), stored_bytes()

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
        """Write the freed slots, the counters and the tenants' bytes. This must be the last step of every change."""
        for num_bytes, numbers in self._freed.items():
            rows = free_rows(num_bytes, self.counters.num_changes, sorted(numbers))
            self._put_all(self._tables.free, list(rows))
        if self._num_written:
            self.counters.on_written(self._num_written, time.time())
        self._txn.put(COUNTERS_KEY, self.counters.pack(), db=self._tables.ledger)
        for tenant, num_bytes in self._tenants.items():
            if num_bytes:
                self._txn.put(tenant, BYTES_OF_TENANT.pack(tenant, num_bytes), db=self._tables.tenants)
            else:
                self._txn.delete(tenant, db=self._tables.tenants)

    def _turn(self, excess_bytes: Callable[[], int], limit: int, tenant: bytes) -> list[bytes]:
        """Evict up to *limit* records of *tenant* (NO_TENANT: of all) by CLOCK while *excess_bytes* is above 0."""
        evicted: list[bytes] = []
        after = b"" if tenant == NO_TENANT else tenant
        while len(evicted) < limit and (excess := excess_bytes()) > 0:
            likely = excess * max(1, self.counters.num_records) // max(1, self.counters.stored_bytes)
            page = self._oldest(tenant, after, min(max(_MIN_ROWS, likely + 1), _MAX_ROWS, limit - len(evicted)))
            if not page:
                raise lmdb.CorruptedError("the counters claim more stored bytes than all records have")
            with self._txn.cursor(db=self._tables.records) as cursor:
                packed_rows = dict(cursor.getmulti([key for _, _, key in page]))
            marked: set[bytes] = set()  # parents of the records that were skipped in this page
            gone: dict[bytes, tuple[bytes, bytes, OldRow]] = {}
            for position, owner, key in page:
                if excess <= 0:
                    break
                after = position if tenant == NO_TENANT else tenant + position
                packed = packed_rows.get(key)
                if packed is None:
                    raise lmdb.CorruptedError("an entry of the eviction order does not match its record")
                old = OldRow.unpack(key, packed, position, owner)
                if not old.is_marked and key not in marked:
                    gone[key] = position, owner, old
                    excess -= old.charged_bytes
                elif not self._num_chances_left:  # this transaction may skip no more marked records
                    self._drop(gone)
                    return evicted + list(gone)
                else:
                    self._num_chances_left -= 1
                    row = RecordRow.unpack(key, packed)
                    self._renew(key, row)
                    marked.add(row.parent)
            after += b"\0"
            self._drop(gone)
            evicted += gone
        return evicted

    def _oldest(self, tenant: bytes, after: bytes, limit: int) -> list[tuple[bytes, bytes, bytes]]:
        """Return position, tenant and key of up to *limit* records of *tenant* (NO_TENANT: of all), oldest first.

        *after* is the key in the table from which on to look.
        """
        is_all = tenant == NO_TENANT
        with self._txn.cursor(db=self._tables.order if is_all else self._tables.owned) as cursor:
            rows = list(islice(cursor, limit)) if cursor.set_range(after) else []
        check_ascending([place for place, _ in rows], after)
        if is_all:
            found = [(place, verified(place, row)) for place, row in rows]
            page = [(place, owned[:TENANT_BYTES], owned[TENANT_BYTES:]) for place, owned in found]
        else:
            page = [(place[TENANT_BYTES:], tenant, key) for place, key in rows if place.startswith(tenant)]
        if not all(key for _, _, key in page):
            raise lmdb.CorruptedError("an entry of the eviction order has no key")
        return page

    def _rows_of(self, keys: Iterable[bytes]) -> dict[bytes, RecordRow]:
        """Return the rows of those of *keys* that have a record."""
        valid = [key for key in keys if 0 < len(key) <= MAX_KEY_BYTES]
        with self._txn.cursor(db=self._tables.records) as cursor:
            return {key: RecordRow.unpack(key, packed) for key, packed in cursor.getmulti(valid)}

    def _drop(self, rows: Mapping[bytes, tuple[bytes, bytes, OldRow]]) -> None:
        """Delete records from all tables, free their slots, and count them out.

        *rows* has for each key the record's place in the eviction order, its tenant and its row.
        """
        delete, records, order = self._txn.delete, self._tables.records, self._tables.order
        num_bytes = 0
        for key, (position, owner, (charged_bytes, _, slot_bytes, slot_number)) in rows.items():
            delete(key, b"", records)
            delete(position, b"", order)
            if owner != NO_TENANT:
                delete(owner + position, b"", self._tables.owned)
                self._charge(owner, -charged_bytes)
            self._freed[slot_bytes].append(slot_number)
            num_bytes += charged_bytes
        self.counters.num_records -= len(rows)
        self.counters.stored_bytes -= num_bytes

    def _leave_place(self, position: bytes, owner: bytes) -> None:
        self._txn.delete(position, db=self._tables.order)
        if owner != NO_TENANT:
            self._txn.delete(owner + position, db=self._tables.owned)

    def _take_free(self, num_bytes: int, change: int, numbers: set[int]) -> None:
        """Remove from the list of free slots the slots *numbers* of *num_bytes*, which *change* has freed."""
        there: dict[bytes, tuple[int, ...]] = {}
        with self._txn.cursor(db=self._tables.free) as cursor:
            is_any = cursor.set_range(FREE.pack(num_bytes, change, 0))
            for key, packed in ascending(cursor) if is_any else ():
                *freed, listed = free_row(key, packed)
                if freed != [num_bytes, change]:
                    break
                there[key] = listed
        num_found = 0
        for key, listed in there.items():
            left = [number for number in listed if number not in numbers]
            if len(left) < len(listed):
                num_found += len(listed) - len(left)
                self._txn.delete(key, db=self._tables.free)
                self._put_all(self._tables.free, list(free_rows(num_bytes, change, left)))
        if num_found < len(numbers):
            raise lmdb.CorruptedError("a reserved slot is not listed as free")

    def _end_of(self, num_bytes: int) -> int:
        """Return the number of slots in the slab with slots of *num_bytes*."""
        size = num_bytes.to_bytes(4, "big")
        packed = self._txn.get(size, db=self._tables.slabs)
        return 0 if packed is None else int(SLOTS.unpack(size, packed)[0])

    def _add_hole(self, slot: Slot) -> None:
        hole = HOLE.pack(*slot)
        self._txn.put(hole, checksum(hole), db=self._tables.holes)

    def _put_all(self, db: "lmdb._Database", rows: Sequence[tuple[bytes, bytes]]) -> None:
        with self._txn.cursor(db=db) as cursor:
            cursor.putmulti(rows)

    def _charge(self, tenant: bytes, num_bytes: int) -> None:
        if tenant != NO_TENANT:
            self._tenants[tenant] = self.bytes_of(tenant) + num_bytes

    def _renew(self, key: bytes, row: RecordRow) -> None:
        """Make a record the newest, without a mark, and mark its parent as recently used."""
        self._leave_place(SEQUENCE.pack(row.sequence), row.tenant)
        row = row._replace(sequence=self.counters.next_sequence, is_marked=False)
        self.counters.next_sequence += 1
        self._txn.put(key, row.pack(key), db=self._tables.records)
        place = SEQUENCE.pack(row.sequence)
        if not self._txn.put(place, _place_row(place, row.tenant, key), append=True, db=self._tables.order):
            raise lmdb.CorruptedError("the eviction order has an entry that is newer than all records")
        if row.tenant != NO_TENANT:
            self._txn.put(row.tenant + place, key, db=self._tables.owned)
        if row.parent:
            self.mark([row.parent])


def _place_row(place: bytes, tenant: bytes, key: bytes) -> bytes:
    """Return the row of a record in the eviction order, at *place*."""
    owned = tenant + key
    return owned + checksum(place, owned)
