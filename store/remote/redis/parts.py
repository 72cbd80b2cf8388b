"""Splitting of large values into parts: a server does nothing else while it receives or sends tens of MiB."""

import struct
from typing import NamedTuple

import xxhash

from kvtier.store.remote_store import RemoteRecord

PART_BYTES = 4 << 20
_SLACK_BYTES = 4096  # that a part may have in addition, so that the overhead of encryption does not add a part
_MAGIC = b"KVTP"  # no record begins like this
_ID_BYTES = 16
_MAX_PARTS = 1024  # of a value; the largest block, 2 GiB, has 512
_HEAD = struct.Struct(f"<4s{_ID_BYTES}sH")  # magic, the parts' id, number of parts after the first
HEAD_BYTES = _HEAD.size


class Parts(NamedTuple):
    """A description of a large value's parts after the first. It is stored at the start of the first part.

    *parts_id* is a digest of the record. So the parts of two writers are never mixed up, unless their records have the
    same bytes.
    """

    parts_id: bytes
    num_parts: int

    @classmethod
    def parse_name(cls, value: memoryview | bytes) -> "Parts | None":
        """Return the description of the other parts if *value* is the first part of a large value, otherwise None."""
        if len(value) < HEAD_BYTES or bytes(value[: len(_MAGIC)]) != _MAGIC:
            return None
        _, parts_id, num_parts = _HEAD.unpack_from(value)
        return cls(parts_id, min(num_parts, _MAX_PARTS))

    def names(self, name: bytes) -> list[bytes]:
        """Return the Redis keys of a large value's parts after the first. The first part has the key *name*."""
        return [b"%b:%b:%d" % (name, self.parts_id.hex().encode(), part_id) for part_id in range(self.num_parts)]


def in_parts(record: RemoteRecord) -> tuple[bytes, list[memoryview]]:
    """Split *record* into its first part, which is stored under the record's name, and the other parts.

    Send the first part to the server last, so that no reader finds it without the others. All parts have about the same
    size. A small record has only the first part. The other parts are views of the record's payload.
    """
    payload = record.payload.cast("B")
    num_parts = max(1, -(-(payload.nbytes - _SLACK_BYTES) // PART_BYTES))
    if num_parts == 1:
        return b"".join((record.header, payload)), []
    part_bytes = -(-payload.nbytes // num_parts)
    first, *rest = [payload[start : start + part_bytes] for start in range(0, payload.nbytes, part_bytes)]
    hashed = xxhash.xxh3_128(record.header)
    hashed.update(payload)
    head = _HEAD.pack(_MAGIC, hashed.digest(), len(rest))
    return b"".join((head, record.header, first)), rest


def joined(first: memoryview, rest: list[memoryview]) -> memoryview:
    """Return the record, joined from its first part and the other parts."""
    return memoryview(b"".join((first[HEAD_BYTES:], *rest)))
