"""What the sub-databases of an LMDB store hold, as bytes."""

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import lmdb

from kvtier.store.blob_store import TENANT_BYTES
from kvtier.store.record import HEADER_BYTES
from kvtier.store.slab import PAGE_BYTES, Slot

SEQUENCE = struct.Struct(">Q")  # big-endian, so that LMDB's byte order is the order of age
FREE = struct.Struct(">IQQ")  # size of the slot, the change that freed it, its number
HOLE = struct.Struct(">IQ")  # size, number
SLOTS = struct.Struct("<Q")
TENANT_BYTES_OF = struct.Struct("<Q")
COUNTERS_KEY = b"counters"
NOBODY = bytes(TENANT_BYTES)
# Sequence number, charged bytes, mark, tenant, size and number of the slot; header and parent's key follow.
_ROW = struct.Struct(f">QQ?{TENANT_BYTES}sIQ")
_COUNTERS = struct.Struct("<7Qd2Q")
_DAY_S = 86_400.0


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

    @classmethod
    def unpack(cls, packed: "bytes | memoryview") -> "Counters":
        """Counters as they are kept."""
        return cls(*_COUNTERS.unpack(packed))

    def pack(self) -> bytes:
        """As it is kept."""
        return _COUNTERS.pack(*(getattr(self, name) for name in self.__slots__))

    def wrote(self, num_bytes: int, now: float) -> None:
        """That much has been written."""
        self.written_bytes_total += num_bytes
        self.written_lately_bytes = self.lately_bytes(now) + num_bytes
        self.written_lately_at = now

    def lately_bytes(self, now: float) -> int:
        """`written_lately_bytes`, faded until *now*."""
        return round(self.written_lately_bytes * math.exp(-max(0.0, now - self.written_lately_at) / _DAY_S))


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
        slot = plausible(Slot(num_bytes, number))
        return cls(*facts, slot, row[_ROW.size : end], row[end:])  # type: ignore[call-arg]

    @staticmethod
    def located(row: bytes) -> tuple[bytes, Slot]:
        """Header and slot of a row as it is kept: all that a read needs."""
        *_, num_bytes, number = _ROW.unpack_from(row)
        return row[_ROW.size : _ROW.size + HEADER_BYTES], plausible(Slot(num_bytes, number))

    def pack(self) -> bytes:
        """As it is kept."""
        return _ROW.pack(*self[:4], *self.slot) + self.header + self.parent


def plausible(slot: Slot) -> Slot:
    """*slot*, if a file can have it: what follows from the row of a broken page is not even tried."""
    if slot.num_bytes == 0 or slot.num_bytes % PAGE_BYTES or (slot.number + 1) * slot.num_bytes >> 62:
        raise lmdb.CorruptedError(f"no payload is in {slot}")
    return slot
