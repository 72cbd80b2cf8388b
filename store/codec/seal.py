"""Sealing: turns a block into the header and the value to store. Unsealing turns them back and verifies the block."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from kvtier.store.blob_store import Blob
from kvtier.store.codec.cipher import OVERHEAD_BYTES, Cipher
from kvtier.store.codec.codec import CODEC_BY_ID, NO_CODEC, Codec
from kvtier.store.codec.codec_choice import CodecChoice
from kvtier.store.record import (
    NAMESPACE_BYTES,
    NO_CIPHER_ID,
    NO_DIGEST,
    NO_KEY_ID,
    Fault,
    Record,
    digest,
    digest_for_threads,
)
from kvtier.store.slab import PAGE_BYTES as _PAGE_BYTES
from kvtier.store.slab import slot_bytes

# Bytes of the index per record: rows in `records`, `order` and `free` for a key of 50 to 70 bytes, in pages 2/3 full.
_INDEX_BYTES = 512
MAX_BLOCK_BYTES = 2 << 30  # more than any block has; index rows have four bytes for the size of a slot
_NUM_READERS = 2  # minimum: several threads read concurrently, in a process that does little else
_SIZE_CLASSES = 8  # number of lengths that the values of one raw length may have


class Sealed(NamedTuple):
    """A block as it is stored. *payload* is the whole padded value, possibly a view of the caller's memory."""

    key: bytes
    header: bytes
    payload: memoryview
    charged_bytes: int


@cache  # a store has blocks of few sizes
def charged_bytes(value_bytes: int) -> int:
    """Return how many bytes of the capacity a value of *value_bytes* takes: its slot on disk and its index rows."""
    return slot_bytes(value_bytes) + _INDEX_BYTES


def max_charged_bytes(blobs: Sequence[Blob], cipher: Cipher | None = None) -> int:
    """Return how many bytes of the store's capacity are taken by *blobs* if the codec does not shrink them."""
    return sum(_charged_raw(num_bytes, cipher) * num for num_bytes, num in Counter(_sizes(blobs)).items())


def check_fits(blobs: Sequence[Blob], capacity_bytes: int, cipher: Cipher | None = None) -> None:
    """Raise ValueError if one of *blobs* is empty, or too large even for an empty store."""
    for num_bytes in set(_sizes(blobs)):
        if not 0 < num_bytes <= MAX_BLOCK_BYTES:
            raise ValueError(f"store: a block has {num_bytes} bytes; it must have 1 to {MAX_BLOCK_BYTES}")
        if _charged_raw(num_bytes, cipher) > capacity_bytes:
            raise ValueError(
                f"store: a block of {num_bytes} bytes does not fit a capacity of {capacity_bytes}; "
                "raise capacity_bytes or use smaller blocks"
            )


def _sizes(blobs: Sequence[Blob]) -> list[int]:
    return [blob.raw.nbytes for blob in blobs]


def _charged_raw(num_bytes: int, cipher: Cipher | None) -> int:
    return charged_bytes(num_bytes + (0 if cipher is None else OVERHEAD_BYTES))


def value_bytes(codec: Codec, stored_length: int, raw_length: int) -> int:
    """Return the length, with padding, at which an encoded block of *stored_length* bytes is stored.

    A block is padded only if the lengths of the codec's payloads vary. The store needs a slab file for each length, so
    there are only 8 padded lengths: the multiples of an eighth of the raw length, rounded up to whole pages. For
    example, a block that shrinks 1.45 times takes six eighths.
    """
    if codec.is_fixed_length:
        return stored_length
    num_eighths = -(-_SIZE_CLASSES * stored_length // max(raw_length, 1))
    num_pages = -(-num_eighths * raw_length // (_SIZE_CLASSES * _PAGE_BYTES))
    return num_pages * _PAGE_BYTES


def seal(blob: Blob, codec: Codec | CodecChoice, cipher: Cipher | None = None) -> Sealed:
    """Encode *blob* for storage, and encrypt it if there is a *cipher*.

    The block is stored raw if encoding it with *codec* would save less than an eighth, or less than a page. So no value
    is longer than the raw block, except for the 44 bytes that encryption adds. A block that is neither encoded nor
    encrypted is not copied. Raises ValueError if *codec* cannot encode the block.
    """
    if codec is NO_CODEC and cipher is None:
        return seal_all([blob], codec)[0]
    codec, payload = _encode(blob.raw, codec.pick(blob.raw) if isinstance(codec, CodecChoice) else codec, cipher)
    known = blob.digest if codec.is_lossless else _digest_of_decoded(codec, payload, blob)
    record = Record(
        namespace=blob.key[:NAMESPACE_BYTES],
        codec_id=codec.codec_id,
        raw_length=blob.raw.nbytes,
        stored_length=payload.nbytes + (0 if cipher is None else OVERHEAD_BYTES),
        digest=known if cipher is None else NO_DIGEST,
        cipher_id=NO_CIPHER_ID if cipher is None else cipher.cipher_id,
        key_id=NO_KEY_ID if cipher is None else cipher.key_id,
    )
    header = record.pack(blob.key)
    length = value_bytes(codec, record.stored_length, record.raw_length)
    if cipher is None and length == payload.nbytes:
        return Sealed(blob.key, header, payload, charged_bytes(length))

    value = np.empty(length, dtype=np.uint8)
    value[record.stored_length :] = 0
    if cipher is None:
        value[: record.stored_length] = payload
    else:
        cipher.encrypt(known, payload, header + blob.key, value[: record.stored_length].data)
    return Sealed(blob.key, header, value.data, charged_bytes(length))


def seal_all(blobs: Sequence[Blob], codec: Codec | CodecChoice, cipher: Cipher | None = None) -> list[Sealed]:
    """Do as `seal` for each of *blobs*."""
    if codec is not NO_CODEC or cipher is not None:
        return [seal(blob, codec, cipher) for blob in blobs]
    pack = Record.pack_plain
    sized = [(blob.key, blob.digest, blob.raw, blob.raw.nbytes) for blob in blobs]
    return [Sealed(key, pack(key, num, known), raw, charged_bytes(num)) for key, known, raw, num in sized]


def unseal(
    key: bytes, header: bytes, payload: memoryview, out: memoryview, cipher: Cipher | None = None
) -> bytes | Fault:
    """Decrypt and decode a stored value into *out*, verify the block, and return its digest or a fault.

    The value is at the start of *payload*, and the bytes after it are ignored. *payload* may be *out* itself if the
    value is neither encoded nor encrypted. With a *cipher*, a record that is not encrypted is rejected, because any
    process may have written it. After a fault, *out* holds arbitrary bytes.
    """
    record = Record.unpack(key, header)
    if isinstance(record, Fault):
        return record
    codec = CODEC_BY_ID.get(record.codec_id)
    if codec is None or record.cipher_id not in (NO_CIPHER_ID, Cipher.cipher_id):
        return Fault.VERSION
    own = (NO_CIPHER_ID, NO_KEY_ID) if cipher is None else (cipher.cipher_id, cipher.key_id)
    if (record.cipher_id, record.key_id) != own:
        return Fault.KEY
    if record.raw_length != out.nbytes or payload.nbytes < record.stored_length:
        return Fault.TORN

    stored = payload if payload.nbytes == record.stored_length else payload[: record.stored_length]
    try:
        if cipher is None:
            known = record.digest
            codec.decode(stored, out)
        else:
            known = _decrypt(cipher, stored, header + key, codec, out)
    except ValueError:
        return Fault.CORRUPT
    return known if digest_for_threads(_NUM_READERS)(out) == known else Fault.CORRUPT


def fault_of(key: bytes, header: bytes, payload: memoryview, cipher: Cipher | None = None) -> Fault | None:
    """Return the fault of a stored record, or None if it is good. The block is decoded into new memory."""
    record = Record.unpack(key, header)
    if isinstance(record, Fault):
        return record
    try:
        out = memoryview(bytearray(record.raw_length))
    except (MemoryError, OverflowError):  # no block has that length, although the checksum is right
        return Fault.TORN
    result = unseal(key, header, payload, out, cipher)
    return result if isinstance(result, Fault) else None


def _encode(raw: memoryview, codec: Codec, cipher: Cipher | None) -> tuple[Codec, memoryview]:
    """Encode *raw*; return the codec used and the payload. The codec is `none` if *codec* does not save enough."""
    payload = codec.encode(raw)
    if payload is raw:
        return codec, raw
    length = value_bytes(codec, payload.nbytes + (0 if cipher is None else OVERHEAD_BYTES), raw.nbytes)
    if length >= raw.nbytes:  # less than an eighth or a page is saved
        return NO_CODEC, raw
    return codec, payload


def _digest_of_decoded(codec: Codec, payload: memoryview, blob: Blob) -> bytes:
    """Return the digest of the bytes to which *payload* decodes.

    If the raw bytes were damaged before encoding, return the blob's digest instead. It never matches the decoded bytes,
    so every read reports the damage.
    """
    if digest(blob.raw) != blob.digest:
        return blob.digest
    out = np.empty(blob.raw.nbytes, dtype=np.uint8).data
    codec.decode(payload, out)
    return digest(out)


def _decrypt(cipher: Cipher, stored: memoryview, context: bytes, codec: Codec, out: memoryview) -> bytes:
    """Decrypt *stored*, decode it into *out*, and return the digest stored with it."""
    if codec is NO_CODEC:
        return cipher.decrypt(stored, context, out)
    payload = np.empty(max(stored.nbytes - OVERHEAD_BYTES, 0), dtype=np.uint8).data
    known = cipher.decrypt(stored, context, payload)
    codec.decode(payload, out)
    return known
