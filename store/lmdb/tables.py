"""`Tables`: the sub-databases of an LMDB store."""

import ctypes
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise, starmap
from pathlib import Path
from typing import Any

import lmdb

from kvtier.store.blob_store import MAX_KEY_BYTES, TENANT_BYTES
from kvtier.store.durability import Durability
from kvtier.store.folder import open_own
from kvtier.store.lmdb.index_file import LITTLE_BYTES, IndexFile
from kvtier.store.lmdb.rows import (
    BYTES_OF_TENANT,
    COUNTERS_KEY,
    FREE,
    HOLE,
    NO_TENANT,
    SEQUENCE,
    SLOTS,
    Counters,
    Row,
    verified,
)
from kvtier.store.slab import Slot

_TABLES = (b"records", b"free", b"holes", b"slabs", b"order", b"owned", b"tenants", b"ledger")
MAX_DBS = len(_TABLES)
_MOST_READERS = 256
_LOCK_BYTES = (_MOST_READERS + 64) * 64  # at least: LMDB takes 64 bytes for each reader, and 200 for the file
_parents: "weakref.WeakSet[Any]" = weakref.WeakSet()  # open objects that a forked process must not close


class Tables:
    """One LMDB environment with eight sub-databases. The payloads are in slots of the `Slabs` beside it.

    records   key -> sequence number, charged bytes, mark, tenant, slot, header, parent's key
    order     sequence number -> tenant and key, oldest first
    owned     tenant and sequence number -> key: the same order for each tenant
    free      slots without a record that have disk space: size, change that freed it, number
    holes     slots without a record and without disk space: size, number
    slabs     size -> how many slots there are
    tenants   tenant -> charged bytes
    ledger    `Counters`
    """

    def __init__(self, file: IndexFile, tables: "Sequence[lmdb._Database]") -> None:
        self.file = file
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

    @property
    def env(self) -> lmdb.Environment:
        return self.file.env

    @staticmethod
    def capacity_in(env: lmdb.Environment) -> int:
        """The capacity in the ledger of an environment that is open for reading only."""
        return Tables.counters_in(env).capacity_bytes

    @staticmethod
    def counters_in(env: lmdb.Environment) -> Counters:
        """The ledger of an environment that is open for reading only."""
        ledger = env.open_db(b"ledger", create=False)
        with env.begin() as txn:
            packed = txn.get(COUNTERS_KEY, db=ledger)
        return Counters() if packed is None else Counters.unpack(packed)

    def counters(self, txn: "lmdb.Transaction[bytes] | lmdb.Transaction[memoryview]") -> Counters:
        """The ledger as *txn* sees it."""
        packed = txn.get(COUNTERS_KEY, db=self.ledger)
        return Counters() if packed is None else Counters.unpack(bytes(packed))

    def num_slots(self, txn: "lmdb.Transaction[bytes]") -> dict[int, int]:
        """Number of slots in each slab, by the size of its slots."""
        return {int.from_bytes(size, "big"): SLOTS.unpack(size, packed)[0] for size, packed in _rows(txn, self.slabs)}

    def hole_slots(self, txn: "lmdb.Transaction[bytes]") -> Iterator[Slot]:
        """The holes: slots without disk space."""
        return (Slot(*HOLE.unpack_key(*row)) for row in _rows(txn, self.holes))

    def unallocated(self, txn: "lmdb.Transaction[bytes]", slots: Iterable[Slot]) -> list[Slot]:
        """Those of *slots* that should have no disk space: holes, and slots behind the last one of a slab."""
        ends = self.num_slots(txn)
        return [
            slot
            for slot in slots
            if slot.number >= ends.get(slot.num_bytes, 0) or txn.get(HOLE.pack(*slot), db=self.holes) is not None
        ]

    def located(self, txn: "lmdb.Transaction[bytes]", key: bytes) -> tuple[bytes, Slot] | None:
        """Header and slot of the record of *key*; None if there is none."""
        packed = txn.get(key, db=self.records) if 0 < len(key) <= MAX_KEY_BYTES else None
        return None if packed is None else Row.located(key, packed)

    def keys_before(self, txn: "lmdb.Transaction[bytes]", sequence: int | None, most: int) -> list[tuple[int, bytes]]:
        """Up to *most* records older than *sequence* (None: the newest), as sequence number and key, newest first."""
        with txn.cursor(db=self.order) as cursor:
            if sequence is None:
                is_there = cursor.last()
            else:
                is_there = cursor.prev() if cursor.set_range(SEQUENCE.pack(sequence)) else cursor.last()
            rows = cursor.iterprev() if is_there else iter(())
            page = [
                (SEQUENCE.unpack(place)[0], verified(place, row)[TENANT_BYTES:]) for place, row in islice(rows, most)
            ]
        for before, after in pairwise([(sequence, b""), *page]):
            if before[0] is not None and before[0] <= after[0]:  # going on from the last would never end
                raise lmdb.CorruptedError("the keys of a table are out of order")
        return page

    def bytes_of_tenants(self, txn: "lmdb.Transaction[bytes]", tenants: Iterable[bytes]) -> dict[bytes, int]:
        """Charged bytes of each of *tenants* that has records."""
        found = {tenant: txn.get(tenant, db=self.tenants) for tenant in tenants if tenant}
        return {
            tenant: BYTES_OF_TENANT.unpack(tenant, packed)[0] for tenant, packed in found.items() if packed is not None
        }

    def check(self, txn: "lmdb.Transaction[bytes]") -> None:
        """Raise AssertionError if tables or slots disagree, or a record may be evicted before one that continues it."""
        counters = self.counters(txn)
        places = {verified(place, row): place for place, row in _rows(txn, self.order)}
        order = {owned[TENANT_BYTES:]: SEQUENCE.unpack(place)[0] for owned, place in places.items()}
        owners = {owned[TENANT_BYTES:]: owned[:TENANT_BYTES] for owned in places}
        rows = {key: Row.unpack(key, row) for key, row in _rows(txn, self.records)}

        assert {key: row.sequence for key, row in rows.items()} == order, "records and order disagree"
        assert txn.stat(db=self.order)["entries"] == len(order), "a key stands twice in the order"
        assert counters.num_records == len(rows), f"ledger: {counters.num_records} of {len(rows)} records"
        recount = sum(row.charged_bytes for row in rows.values())
        assert counters.stored_bytes == recount, f"ledger: {counters.stored_bytes} bytes, recount {recount}"
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
            assert is_safe, "a record would leave before the one that continues it"

    def _check_slots(self, txn: "lmdb.Transaction[bytes]", used: list[Slot], slab_bytes: int) -> None:
        """Raise AssertionError unless every slot has a record, is free, or is a hole."""
        free = [Slot(num_bytes, number) for num_bytes, _, number in starmap(FREE.unpack_key, _rows(txn, self.free))]
        slots = used + free + list(self.hole_slots(txn))
        assert len(set(slots)) == len(slots), "a slot is two things at once"
        there = self.num_slots(txn)
        assert all(number < there.get(num_bytes, 0) for num_bytes, number in slots), "a slot is used that is not there"
        assert len(slots) == sum(there.values()), "a slot is neither a record's, nor free, nor a hole"
        taken = sum(slot.num_bytes for slot in used + free)
        assert taken == slab_bytes, f"ledger: {slab_bytes} bytes of slots, recount {taken}"


def open_tables(folder: Path, map_bytes: int, durability: Durability) -> Tables:
    """Open the tables of the index in *folder*, made if there are none. OSError or lmdb.Error."""
    _take_room(folder / "lock.mdb", _LOCK_BYTES)
    descriptor = open_own(folder / "data.mdb", os.O_RDWR | os.O_CREAT)
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
            file.reserve(LITTLE_BYTES)
        tables = Tables(file, [_table(env, name, is_new) for name in _TABLES])
        with env.begin() as txn:
            tables.counters(txn)
            tables.num_slots(txn)
    except BaseException:
        file.close()
        raise
    return tables


def _table(env: lmdb.Environment, name: bytes, is_new: bool) -> "lmdb._Database":
    """Open a sub-database, which is made if the environment is new. CorruptedError if it is missing otherwise."""
    try:
        return env.open_db(name, create=is_new)
    except lmdb.NotFoundError as error:
        raise lmdb.CorruptedError(f"the table {name.decode()} is not there") from error


def keep_when_forked(opened: "lmdb.Environment | lmdb.Transaction[bytes]") -> None:
    """Never free *opened* in a process forked from this one.

    Freeing it there would free this process's slot in the table of readers, which the two share, and LMDB would
    overwrite pages that this process still reads.
    """
    _parents.add(opened)


def _keep_parents() -> None:
    for opened in _parents:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(opened))


os.register_at_fork(after_in_child=_keep_parents)


def _opened(folder: Path, map_bytes: int, durability: Durability) -> lmdb.Environment:
    # Without readahead cold reads are 14 times slower. The map size never changes: LMDB would unmap pages under a
    # reader. For `writemap` and `sync` see `Durability`.
    return lmdb.open(
        str(folder),
        map_size=map_bytes,
        max_dbs=MAX_DBS,
        max_readers=_MOST_READERS,
        max_spare_txns=16,
        writemap=durability.is_mapped,
        sync=not durability.is_mapped,
        readahead=True,
        mode=0o600,
    )


def _take_room(path: Path, num_bytes: int) -> None:
    """Take disk space for the first *num_bytes* of a mapped file, as `IndexFile.reserve` does; OSError."""
    file = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    finally:
        os.close(file)


def ascending(rows: Iterable[tuple[bytes, bytes]], start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    """*rows*, whose keys must ascend from *start*; else CorruptedError: a damaged tree may lead round in a circle."""
    last = None
    for key, row in rows:
        if key < start or (last is not None and key <= last):
            raise lmdb.CorruptedError("the keys of a table are out of order")
        last = key
        yield key, row


def _rows(txn: "lmdb.Transaction[bytes]", db: "lmdb._Database") -> Iterator[tuple[bytes, bytes]]:
    return ascending(txn.cursor(db=db))
