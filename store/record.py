"""The header that is stored with every payload, and the faults that a read may meet."""

import struct
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import ReadableBuffer

NAMESPACE_BYTES = 16
DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)  # in the header of an encrypted record, whose digest is encrypted with the payload
NO_CIPHER_ID = 0
NO_KEY_ID = bytes(8)

_MAGIC = b"KVTR"
_VERSION = 2
# magic, version, codec id, cipher id, key id, namespace, raw length, stored length, digest of the decoded bytes
_FIELDS = struct.Struct("<4sHHB8s16sQQ16s")
_START = struct.pack("<4sH", _MAGIC, _VERSION)  # magic and version stand here in every version
_CHECKSUM_BYTES = 8
_PIECE_BYTES = 64 << 10
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES  # 73


class Fault(StrEnum):
    """Why a read gave no block."""

    MISSING = "missing"  # no such key: the ordinary miss
    CORRUPT = "corrupt"  # bytes of the header or the payload are not those that were put
    TORN = "torn"  # a length is not the one expected: the payload's, or the block's
    FOREIGN = "foreign"  # a record of another namespace under this key
    VERSION = "version"  # header format, codec or cipher that this program does not know
    KEY = "key"  # encrypted with another key than the store has, or encrypted in a store without a key, or the reverse
    IO_ERROR = "io_error"  # the store could not be read; the record may be fine

    @property
    def is_bad_record(self) -> bool:
        """Whether the record can never be read again, so that the call that met it deletes it."""
        return self not in _RECORD_MAY_BE_FINE


_RECORD_MAY_BE_FINE = frozenset({Fault.MISSING, Fault.KEY, Fault.IO_ERROR})


def digest(data: "ReadableBuffer") -> bytes:
    """Digest of *data* (xxh3_128, 16 bytes; contiguous), read in place; takes 0.38 of the time of copying it.

    It finds damage, not malice: xxh3 is no cryptographic hash. It is fed pieces so small that the interpreter's lock is
    kept: giving the lock up for 30 us a megabyte, and waiting for it beside a busy thread, took five times as long.
    """
    view = memoryview(data)
    if view.nbytes <= _PIECE_BYTES:
        return xxhash.xxh3_128_digest(view)
    view, running = view.cast("B"), xxhash.xxh3_128()
    for start in range(0, len(view), _PIECE_BYTES):
        running.update(view[start : start + _PIECE_BYTES])
    return running.digest()


def digest_among(num_threads: int) -> "Callable[[ReadableBuffer], bytes]":
    """`digest` for *num_threads* threads at a time: each of several gives up the interpreter's lock for a block."""
    return digest if num_threads == 1 else xxhash.xxh3_128_digest


class Record(NamedTuple):
    """The header of one payload, unpacked; lengths in bytes.

    *stored_length* is the length of the encoded, perhaps encrypted, payload without its padding (see
    `seal.value_bytes`). *digest* is that of the decoded bytes, `NO_DIGEST` if encrypted.
    """

    namespace: bytes
    codec_id: int
    raw_length: int
    stored_length: int
    digest: bytes
    cipher_id: int = NO_CIPHER_ID
    key_id: bytes = NO_KEY_ID

    def pack(self, key: bytes) -> bytes:
        """The header (73 bytes) of the payload at *key*. It is valid at no other key."""
        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            self.codec_id,
            self.cipher_id,
            self.key_id,
            self.namespace,
            self.raw_length,
            self.stored_length,
            self.digest,
        )
        return fields + _checksum(fields, key)

    @classmethod
    def unpack(cls, key: bytes, header: bytes) -> "Record | Fault":
        """The record that *header*, found at *key*, describes, or the fault in it."""
        if len(header) != HEADER_BYTES or not header.startswith(_START):
            return _fault_of_start(header)
        _, _, codec_id, cipher_id, key_id, namespace, raw_length, stored_length, known = _FIELDS.unpack_from(header)
        if namespace != key[:NAMESPACE_BYTES]:
            return Fault.FOREIGN
        if header[_FIELDS.size :] != _checksum(header[: _FIELDS.size], key):
            return Fault.CORRUPT
        return cls(namespace, codec_id, raw_length, stored_length, known, cipher_id, key_id)


def _fault_of_start(header: bytes) -> Fault:
    """The fault in a *header* of a wrong length, magic or version. The right length depends on the version."""
    if len(header) < len(_START):
        return Fault.TORN
    if not header.startswith(_MAGIC):
        return Fault.CORRUPT
    return Fault.TORN if header.startswith(_START) else Fault.VERSION


def _checksum(fields: bytes, key: bytes) -> bytes:
    return xxhash.xxh3_64_digest(fields + key)


def is_plain(header: bytes, num_bytes: int) -> bool:
    """Whether *header* says that the value is the block itself, of *num_bytes*. Its checksum is not verified here."""
    if len(header) != HEADER_BYTES:
        return False
    _, _, codec_id, cipher_id, _, _, raw_length, stored_length, _ = _FIELDS.unpack_from(header)
    return bool(codec_id == 0 and cipher_id == NO_CIPHER_ID and raw_length == stored_length == num_bytes)
