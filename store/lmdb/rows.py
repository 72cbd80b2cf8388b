"""The rows of an LMDB store's sub-databases, packed and unpacked. A row of a broken page raises CorruptedError.

Rows that count, and rows that say where bytes are, end with a checksum over them and their key: a flipped bit, or a
page in the wrong place, must neither free a slot that a record has nor move the end of a slab.
"""

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb
import xxhash

from kvtier.store.blob_store import TENANT_BYTES
from kvtier.store.record import HEADER_BYTES
from kvtier.store.slab import PAGE_BYTES, Slot

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MOST = 1 << 62  # no count gets that high
_CHECKSUM_BYTES = 8


def checksum(key: bytes, row: bytes = b"") -> bytes:
    """The checksum at the end of *row*; of a row that is all key, the whole row."""
    return xxhash.xxh3_64_digest(key + row)


def verified(key: bytes, packed: bytes) -> bytes:
    """*packed* without its checksum. CorruptedError if that is wrong."""
    row = packed[:-_CHECKSUM_BYTES]
    if packed[-_CHECKSUM_BYTES:] != checksum(key, row):
        raise lmdb.CorruptedError("a row makes no sense: its checksum is wrong")
    return row


class _Layout(struct.Struct):
    """A layout of rows: bytes that do not fit it raise CorruptedError."""

    def unpack(self, row: "Buffer") -> tuple[Any, ...]:
        try:
            return super().unpack(row)
        except struct.error as error:
            raise lmdb.CorruptedError(f"a row makes no sense: {error}") from error

    def unpack_from(self, row: "Buffer", offset: int = 0) -> tuple[Any, ...]:
        try:
            return super().unpack_from(row, offset)
        except struct.error as error:
            raise lmdb.CorruptedError(f"a row makes no sense: {error}") from error


class _Counts:
    """A layout of rows that hold counts, with a checksum; implausible counts raise CorruptedError."""

    def __init__(self, layout: str) -> None:
        self._layout = _Layout(layout)
        self.num_bytes = self._layout.size + _CHECKSUM_BYTES  # of a row

    def pack(self, key: bytes, *counts: float) -> bytes:
        """The row of *counts* at *key*."""
        row = self._layout.pack(*self._plausible(counts))
        return row + checksum(key, row)

    def unpack(self, key: bytes, packed: bytes) -> tuple[Any, ...]:
        """The counts in the row at *key*."""
        return self._plausible(self._layout.unpack(verified(key, packed)))

    def _plausible(self, counts: tuple[Any, ...]) -> tuple[Any, ...]:
        if not all(0 <= count < _MOST for count in counts):
            raise lmdb.CorruptedError(f"a row makes no sense: {counts}")
        return counts


class _Slots(_Layout):
    """A layout of keys that describe a slot, where the row is only a checksum of the key."""

    def unpack_key(self, key: bytes, packed: bytes) -> tuple[int, ...]:
        """The fields of *key*. CorruptedError unless its row *packed* is the checksum of it."""
        if packed != checksum(key):
            raise lmdb.CorruptedError("a row makes no sense: its checksum is wrong")
        return self.unpack(key)


SEQUENCE = _Layout(">Q")  # big-endian, so that LMDB's byte order is the order of age
FREE = _Slots(">IQQ")  # size of the slot, the change that freed it, its number
HOLE = _Slots(">IQ")  # size, number
SLOTS = _Counts("<Q")
BYTES_OF_TENANT = _Counts("<Q")
COUNTERS_KEY = b"counters"
NO_TENANT = bytes(TENANT_BYTES)
# Sequence number, charged bytes, mark, tenant, size and number of the slot; header and parent's key follow.
_ROW = _Layout(f">QQ?{TENANT_BYTES}sIQ")
_COUNTERS = _Counts("<7Qd3Q")
_FEWER_COUNTERS = _Counts("<7Qd2Q")  # of a store that has not been written to since it counted quotas
_DAY_S = 86_400.0


@dataclass(slots=True)
class Counters:
    """The ledger: sums that a full count would give, and totals since the store was made."""

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
    quota_evicted_total: int = 0  # of `evicted_total`

    @classmethod
    def unpack(cls, packed: bytes) -> "Counters":
        """The counters in the row *packed*."""
        layout = _FEWER_COUNTERS if len(packed) == _FEWER_COUNTERS.num_bytes else _COUNTERS
        return cls(*layout.unpack(COUNTERS_KEY, packed))

    def pack(self) -> bytes:
        """The row of these counters."""
        return _COUNTERS.pack(COUNTERS_KEY, *(getattr(self, name) for name in self.__slots__))

    def on_written(self, num_bytes: int, now: float) -> None:
        """Count *num_bytes* of payload that were written at *now* (seconds since 1970)."""
        self.written_bytes_total += num_bytes
        self.written_lately_bytes = self.lately_bytes(now) + num_bytes
        self.written_lately_at = now

    def lately_bytes(self, now: float) -> int:
        """`written_lately_bytes` as they have faded by *now*."""
        return round(self.written_lately_bytes * math.exp(-max(0.0, now - self.written_lately_at) / _DAY_S))


class Row(NamedTuple):
    """A record without its payload: its row in `records`."""

    sequence: int
    charged_bytes: int
    is_marked: bool
    tenant: bytes
    slot: Slot
    header: bytes
    parent: bytes

    @classmethod
    def unpack(cls, key: bytes, packed: bytes) -> "Row":
        """Unpack the row at *key*."""
        row = verified(key, packed)
        end = _ROW.size + HEADER_BYTES
        *facts, num_bytes, number = _ROW.unpack_from(row)
        slot = plausible(Slot(num_bytes, number))
        return cls(*facts, slot, row[_ROW.size : end], row[end:])  # type: ignore[call-arg]

    @staticmethod
    def located(key: bytes, packed: bytes) -> tuple[bytes, Slot]:
        """Header and slot of the packed row at *key*: all that a read needs."""
        row = verified(key, packed)
        *_, num_bytes, number = _ROW.unpack_from(row)
        return row[_ROW.size : _ROW.size + HEADER_BYTES], plausible(Slot(num_bytes, number))

    def pack(self, key: bytes) -> bytes:
        """The row packed for *key*."""
        row = _ROW.pack(*self[:4], *self.slot) + self.header + self.parent
        return row + checksum(key, row)


def plausible(slot: Slot) -> Slot:
    """*slot* itself. CorruptedError if no file can have it: such a slot comes from a broken page."""
    if slot.num_bytes == 0 or slot.num_bytes % PAGE_BYTES or (slot.number + 1) * slot.num_bytes >> 62:
        raise lmdb.CorruptedError(f"no payload is in {slot}")
    return slot
