"""The sub-databases of an LMDB store."""

import ctypes
import errno
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise, starmap
from pathlib import Path
from typing import Any

import lmdb

from kvtier.store.blob_store import MAX_KEY_BYTES, TENANT_BYTES
from kvtier.store.durability import Durability
from kvtier.store.folder import open_own
from kvtier.store.lmdb.rows import (
    COUNTERS_KEY,
    FREE,
    HOLE,
    NOBODY,
    SEQUENCE,
    SLOTS,
    TENANT_BYTES_OF,
    Counters,
    Row,
    verified,
)
from kvtier.store.slab import PAGE_BYTES, Slot

_TABLES = (b"records", b"free", b"holes", b"slabs", b"order", b"owned", b"tenants", b"ledger")
MAX_DBS = len(_TABLES)
SPARE_PAGES = 64  # left free by every change that adds: what a deletion of 8 records needs, three levels deep
LITTLE_BYTES = SPARE_PAGES * PAGE_BYTES  # of pages that a change may make new that removes 8 records at most
_AHEAD_BYTES = 8 << 20  # of disk space that is taken at a time
_MOST_READERS = 256
_LOCK_BYTES = (_MOST_READERS + 64) * 64  # at least: 64 bytes for each reader, 200 for all
_parents: "weakref.WeakSet[Any]" = weakref.WeakSet()  # what is open here, and a forked process must not close


class Tables:
    """One LMDB environment with eight sub-databases. Payloads are in slots of the `Slabs` beside it.

    records   key -> sequence number, charged bytes, mark, tenant, slot, header, parent's key
    order     sequence number -> tenant and key, oldest first
    owned     tenant and sequence number -> key: the same of tenants alone
    free      slots without a record: size, change that freed it, number
    holes     those of them that take no room on the medium: size, number
    slabs     size -> how many slots there are
    tenants   tenant -> charged bytes
    ledger    `Counters`
    """

    def __init__(self, folder: Path, map_bytes: int, durability: Durability) -> None:
        """What is there already stays as it is."""
        _take_room(folder / "lock.mdb", _LOCK_BYTES)
        self._data_file: int | None = open_own(folder / "data.mdb", os.O_RDWR | os.O_CREAT)
        try:
            self.env = _opened(folder, map_bytes, durability)
        except BaseException:
            os.close(self._data_file)
            raise
        keep_when_forked(self.env)
        self._syncing = threading.Lock()
        self.is_doubtful = False  # the last sync failed; `_syncing` guards it
        self._reserved_bytes = self._used_bytes()  # pages in use got their disk space before they were
        try:
            self.env.reader_check()
            is_new = self.env.stat()["entries"] == 0
            if is_new:
                self.reserve(LITTLE_BYTES)
            (
                self.records,
                self.free,
                self.holes,
                self.slabs,
                self.order,
                self.owned,
                self.tenants,
                self.ledger,
            ) = (self._table(name, is_new) for name in _TABLES)
            with self.env.begin() as txn:
                self.counters(txn)
                self.num_slots(txn)
        except BaseException:
            self.close()
            raise

    def _table(self, name: bytes, is_new: bool) -> "lmdb._Database":
        """A sub-database, which is there unless the environment is new."""
        try:
            return self.env.open_db(name, create=is_new)
        except lmdb.NotFoundError as error:
            raise lmdb.CorruptedError(f"the table {name.decode()} is not there") from error

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

    @property
    def is_open(self) -> bool:
        return self._data_file is not None

    @property
    def is_removed(self) -> bool:
        """Whether the index has no name any more: what is written to it is gone when it is closed."""
        return self._data_file is not None and os.fstat(self._data_file).st_nlink == 0

    def close(self) -> None:
        """Unmap; a transaction still open elsewhere would crash the process. Once more does nothing."""
        self.env.close()
        if self._data_file is not None:
            os.close(self._data_file)
            self._data_file = None

    def sync(self) -> None:
        """Return when the file, as it was at the call, is on the medium. OSError or lmdb.Error, and from then on until
        somebody has called `write_again`."""
        with self._syncing:
            if self.is_doubtful:
                raise OSError(errno.EIO, "the index could not be synced before")
            try:
                self.env.sync(True)
            except lmdb.Error:
                self.is_doubtful = True
                raise

    def write_again(self) -> None:
        """Have all pages written by the next sync. The kernel takes what it could not write for written, and says so
        once; then a sync works that has done nothing, and a checkpoint would be believed that is not there. The caller
        is the writer."""
        assert self._data_file is not None, "the index is closed"
        with self._syncing:
            for start in range(0, self._used_bytes(), _AHEAD_BYTES):
                pages = os.pread(self._data_file, _AHEAD_BYTES, start)
                if os.pwrite(self._data_file, pages, start) < len(pages):
                    raise OSError(errno.EIO, "the index could not be written again")
            self.is_doubtful = False

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
        return self._used_bytes() + new_bytes + SPARE_PAGES * PAGE_BYTES > self.env.info()["map_size"]

    def index_bytes(self) -> int:
        """What the data file takes on the medium."""
        assert self._data_file is not None, "the index is closed"
        return os.fstat(self._data_file).st_blocks * 512

    def counters(self, txn: "lmdb.Transaction[bytes] | lmdb.Transaction[memoryview]") -> Counters:
        """The ledger as *txn* sees it."""
        packed = txn.get(COUNTERS_KEY, db=self.ledger)
        return Counters() if packed is None else Counters.unpack(bytes(packed))

    def num_slots(self, txn: "lmdb.Transaction[bytes]") -> dict[int, int]:
        """How many slots there are, by their size."""
        return {int.from_bytes(size, "big"): SLOTS.unpack(size, packed)[0] for size, packed in _rows(txn, self.slabs)}

    def hole_slots(self, txn: "lmdb.Transaction[bytes]") -> Iterator[Slot]:
        """Slots that take no room."""
        return (Slot(*HOLE.found(*row)) for row in _rows(txn, self.holes))

    def nobodys(self, txn: "lmdb.Transaction[bytes]", slots: Iterable[Slot]) -> list[Slot]:
        """Those of *slots* that are to take no room: holes, and what is behind the last slot."""
        ends = self.num_slots(txn)
        return [
            slot
            for slot in slots
            if slot.number >= ends.get(slot.num_bytes, 0) or txn.get(HOLE.pack(*slot), db=self.holes) is not None
        ]

    def located(self, txn: "lmdb.Transaction[bytes]", key: bytes) -> tuple[bytes, Slot] | None:
        """Header and slot of *key*."""
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
            if before[0] is not None and before[0] <= after[0]:  # who goes on from the last would never end
                raise lmdb.CorruptedError("the order is out of order")
        return page

    def bytes_of_tenants(self, txn: "lmdb.Transaction[bytes]", tenants: Iterable[bytes]) -> dict[bytes, int]:
        """What those of *tenants* have that have anything."""
        found = {tenant: txn.get(tenant, db=self.tenants) for tenant in tenants if tenant}
        return {
            tenant: TENANT_BYTES_OF.unpack(tenant, packed)[0] for tenant, packed in found.items() if packed is not None
        }

    def check(self, txn: "lmdb.Transaction[bytes]") -> None:
        """AssertionError if ledger, order, records and payloads disagree, or a record might leave before its child."""
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
        expected = {key: (row.tenant, SEQUENCE.pack(row.sequence)) for key, row in rows.items() if row.tenant != NOBODY}
        assert owned == expected, "records and the tenants' orders disagree"
        of_tenants: Counter[bytes] = Counter()
        for row in rows.values():
            of_tenants[row.tenant] += row.charged_bytes
        of_tenants.pop(NOBODY, None)
        everybody = [tenant for tenant, _ in _rows(txn, self.tenants)]
        assert self.bytes_of_tenants(txn, everybody) == of_tenants, "a tenant's bytes are miscounted"
        self._check_slots(txn, [row.slot for row in rows.values()], counters.slab_bytes)
        newest = max(order.values(), default=-1)
        assert newest < counters.next_sequence, f"sequence {newest} is not below {counters.next_sequence}"
        for row in rows.values():
            parent = rows.get(row.parent)
            is_safe = parent is None or parent.is_marked or parent.sequence > row.sequence
            assert is_safe, "a record would leave before the one that continues it"

    def _check_slots(self, txn: "lmdb.Transaction[bytes]", used: list[Slot], slab_bytes: int) -> None:
        """Every slot is a record's, free, or a hole."""
        free = [Slot(num_bytes, number) for num_bytes, _, number in starmap(FREE.found, _rows(txn, self.free))]
        slots = used + free + list(self.hole_slots(txn))
        assert len(set(slots)) == len(slots), "a slot is two things at once"
        there = self.num_slots(txn)
        assert all(number < there.get(num_bytes, 0) for num_bytes, number in slots), "a slot is used that is not there"
        assert len(slots) == sum(there.values()), "a slot is nobody's"
        taken = sum(slot.num_bytes for slot in used + free)
        assert taken == slab_bytes, f"ledger: {slab_bytes} bytes of slots, recount {taken}"

    def _used_bytes(self) -> int:
        return (self.env.info()["last_pgno"] + 1) * PAGE_BYTES


def keep_when_forked(opened: "lmdb.Environment | lmdb.Transaction[bytes]") -> None:
    """Never free *opened* in a process forked from this one: that would free its slot in the table of readers, which
    the two share, and LMDB would write over what this one still reads."""
    _parents.add(opened)


def _keep_parents() -> None:
    for opened in _parents:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(opened))


os.register_at_fork(after_in_child=_keep_parents)


def _opened(folder: Path, map_bytes: int, durability: Durability) -> lmdb.Environment:
    # Without readahead cold reads are 14 times slower. The map size never changes: LMDB would pull it from under a
    # reader. For the other two see `Durability`.
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
    """Have disk space for a file that is mapped, as `reserve` does; OSError."""
    file = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    finally:
        os.close(file)


def ascending(rows: Iterable[tuple[bytes, bytes]], start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    """*rows*, as long as each key is above the one before and none is below *start*: a damaged tree may lead round in
    a circle. CorruptedError then."""
    last = None
    for key, row in rows:
        if key < start or (last is not None and key <= last):
            raise lmdb.CorruptedError("the order is out of order")
        last = key
        yield key, row


def _rows(txn: "lmdb.Transaction[bytes]", db: "lmdb._Database") -> Iterator[tuple[bytes, bytes]]:
    return ascending(txn.cursor(db=db))
