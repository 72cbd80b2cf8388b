"""The header kept with every payload, and why reading one may give nothing."""

import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Self

import xxhash

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

NAMESPACE_BYTES = 16
DIGEST_BYTES = 16

_MAGIC = b"KVTR"
_VERSION = 1
# magic, version, codec id, namespace, raw length, stored length, digest of the raw bytes
_FIELDS = struct.Struct("<4sHH16sQQ16s")
_CHECKSUM_BYTES = 8
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES  # 64


class Fault(StrEnum):
    """Why a read gave nothing. All but `missing` and `io_error` mean a bad record, which is deleted."""

    MISSING = "missing"  # no such key: the ordinary miss
    CORRUPT = "corrupt"  # bytes of the header or the payload are not those that were put
    TORN = "torn"  # a length is not the one expected: the payload's, or the block's
    FOREIGN = "foreign"  # a record of another namespace under this key
    VERSION = "version"  # header format or codec that this program does not know
    IO_ERROR = "io_error"  # the store could not be read; the record may be fine


def digest(data: "ReadableBuffer") -> bytes:
    """Digest of *data* (xxh3_128, 16 bytes), read in place; 0.38 of the time of copying it.

    Finds damage, not malice: xxh3 is no cryptographic hash.
    """
    return xxhash.xxh3_128_digest(data)


@dataclass(frozen=True, slots=True)
class Record:
    """What the header says about one payload; lengths in bytes, *digest* of the raw (decoded) bytes."""

    namespace: bytes
    codec_id: int
    raw_length: int
    stored_length: int
    digest: bytes

    def pack(self, key: bytes) -> bytes:
        """The header (64 bytes) under which the payload is kept at *key*, and at no other key."""
        fields = _FIELDS.pack(
            _MAGIC, _VERSION, self.codec_id, self.namespace, self.raw_length, self.stored_length, self.digest
        )
        return fields + _checksum(fields, key)

    @classmethod
    def unpack(cls, key: bytes, header: bytes) -> Self | Fault:
        """The record of *header* found at *key*, or what is wrong with it."""
        if len(header) != HEADER_BYTES:
            return Fault.TORN
        magic, version, codec_id, namespace, raw_length, stored_length, raw_digest = _FIELDS.unpack_from(header)
        if magic != _MAGIC:
            return Fault.CORRUPT
        if version != _VERSION:  # before the checksum, whose place another version may have moved
            return Fault.VERSION
        if namespace != key[:NAMESPACE_BYTES]:
            return Fault.FOREIGN
        if header[_FIELDS.size :] != _checksum(header[: _FIELDS.size], key):
            return Fault.CORRUPT
        return cls(namespace, codec_id, raw_length, stored_length, raw_digest)


def _checksum(fields: bytes, key: bytes) -> bytes:
    return xxhash.xxh3_64_digest(fields + key)
