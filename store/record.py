"""The header that is stored with every payload, and the faults that a read can return."""

import struct
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import ReadableBuffer

NAMESPACE_BYTES = 16
DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)  # in the header of an encrypted record, whose digest is encrypted with the payload
NO_CIPHER_ID = 0
_NO_CODEC_ID = 0
NO_KEY_ID = bytes(8)

_MAGIC = b"KVTR"
_VERSION = 2
# magic, version, codec id, cipher id, key id, namespace, raw length, stored length, digest of the decoded bytes
_FIELDS = struct.Struct("<4sHHB8s16sQQ16s")
_START = struct.pack("<4sH", _MAGIC, _VERSION)  # every version begins with magic and version
_CHECKSUM_BYTES = 8
_PIECE_BYTES = 64 << 10
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES  # 73


class Fault(StrEnum):
    """Reason why a read returned no block."""

    MISSING = "missing"  # no such key: an ordinary miss
    CORRUPT = "corrupt"  # the header or the payload differs from what was stored
    TORN = "torn"  # the length of the payload or the block is not the expected one
    FOREIGN = "foreign"  # the record under this key belongs to another namespace
    VERSION = "version"  # unknown header version, codec or cipher
    KEY = "key"  # encrypted with another key, encrypted in a store without a key, or not encrypted in a store with one
    IO_ERROR = "io_error"  # the store could not be read; the record may be fine

    @property
    def is_bad_record(self) -> bool:
        """True if the record can never be read again. A read that finds such a record deletes it."""
        return self not in _RECORD_MAY_BE_FINE


_RECORD_MAY_BE_FINE = frozenset({Fault.MISSING, Fault.KEY, Fault.IO_ERROR})


def digest(data: "ReadableBuffer") -> bytes:
    """Return the digest of *data* (xxh3_128, 16 bytes). *data* must be contiguous, and is not copied.

    The digest detects damage, not tampering, because xxh3 is not a cryptographic hash. It takes 0.38 times as long as
    copying the data.
    """
    view = memoryview(data)
    if view.nbytes <= _PIECE_BYTES:
        return xxhash.xxh3_128_digest(view)
    # For larger pieces xxhash releases the GIL. If another thread is busy, waiting to get the GIL back makes hashing
    # take five times as long.
    view, running = view.cast("B"), xxhash.xxh3_128()
    for start in range(0, len(view), _PIECE_BYTES):
        running.update(view[start : start + _PIECE_BYTES])
    return running.digest()


def digest_for_threads(num_threads: int) -> "Callable[[ReadableBuffer], bytes]":
    """Return the digest function for *num_threads* threads that hash blocks at the same time.

    The function for several threads releases the GIL, so that they run in parallel.
    """
    return digest if num_threads == 1 else xxhash.xxh3_128_digest


class Record(NamedTuple):
    """The fields of a payload's header. Lengths are in bytes.

    *stored_length* is the length of the encoded and possibly encrypted payload without its padding (see
    `seal.value_bytes`). *digest* is the digest of the decoded bytes, or `NO_DIGEST` if the record is encrypted.
    """

    namespace: bytes
    codec_id: int
    raw_length: int
    stored_length: int
    digest: bytes
    cipher_id: int = NO_CIPHER_ID
    key_id: bytes = NO_KEY_ID

    def pack(self, key: bytes) -> bytes:
        """Return the header (73 bytes) of the payload at *key*. It is valid at no other key."""
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
        return fields + xxhash.xxh3_64_digest(fields + key)

    @staticmethod
    def pack_plain(key: bytes, num_bytes: int, known: bytes) -> bytes:
        """Return the header of a raw block of *num_bytes* with digest *known*, neither encoded nor encrypted.

        Does as `pack`, in a third of the time.
        """
        fields = _plain_start(key[:NAMESPACE_BYTES], num_bytes) + known
        return fields + xxhash.xxh3_64_digest(fields + key)

    @classmethod
    def unpack(cls, key: bytes, header: bytes) -> "Record | Fault":
        """Return the record that *header*, found at *key*, describes, or the fault in the header."""
        if len(header) != HEADER_BYTES or not header.startswith(_START):
            return _fault_of_start(header)
        _, _, codec_id, cipher_id, key_id, namespace, raw_length, stored_length, known = _FIELDS.unpack_from(header)
        if namespace != key[:NAMESPACE_BYTES]:
            return Fault.FOREIGN
        if header[_FIELDS.size :] != xxhash.xxh3_64_digest(header[: _FIELDS.size] + key):
            return Fault.CORRUPT
        return cls(namespace, codec_id, raw_length, stored_length, known, cipher_id, key_id)


def _fault_of_start(header: bytes) -> Fault:
    """Return the fault in a *header* that has the wrong length, or does not begin with our magic and version.

    A header of another version may have another length, so its fault is always `VERSION`.
    """
    if len(header) < len(_START):
        return Fault.TORN
    if not header.startswith(_MAGIC):
        return Fault.CORRUPT
    return Fault.TORN if header.startswith(_START) else Fault.VERSION


@lru_cache(maxsize=4096)  # a store has blocks of few namespaces and lengths
def _plain_start(namespace: bytes, num_bytes: int) -> bytes:
    """Return the fields, up to the digest, of every raw block of *num_bytes* in the namespace."""
    return _FIELDS.pack(
        _MAGIC, _VERSION, _NO_CODEC_ID, NO_CIPHER_ID, NO_KEY_ID, namespace, num_bytes, num_bytes, NO_DIGEST
    )[:-DIGEST_BYTES]


def plain_digest(key: bytes, header: bytes, num_bytes: int) -> bytes | None:
    """Return the digest in *header*, found at *key*, of a raw block of *num_bytes*, neither encoded nor encrypted.

    Returns None for any other header, also one that is damaged: `Record.unpack` finds the fault. Takes a quarter of the
    time of that.
    """
    if len(header) != HEADER_BYTES or not header.startswith(_plain_start(key[:NAMESPACE_BYTES], num_bytes)):
        return None
    if header[_FIELDS.size :] != xxhash.xxh3_64_digest(header[: _FIELDS.size] + key):
        return None
    return header[_FIELDS.size - DIGEST_BYTES : _FIELDS.size]
