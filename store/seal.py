"""From a blob to the header and payload that are stored, and back, verified."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.store.blob_store import Blob
from kvtier.store.codec import NO_CODEC, Codec, codec_by_id
from kvtier.store.record import NAMESPACE_BYTES, Fault, Record, digest

_PAGE_BYTES = 4096
_PAGE_HEADER_BYTES = 16
# Rows in `records`, `payloads` and `order` for a key of 50 to 70 bytes at 2/3 full pages.
_INDEX_BYTES = 512


@dataclass(frozen=True, slots=True)
class Sealed:
    """A block as it is stored; *payload* may be a view of the caller's memory."""

    key: bytes
    header: bytes
    payload: memoryview
    charged_bytes: int


def charged_bytes(stored_length: int) -> int:
    """What a payload of *stored_length* bytes counts against a capacity: its LMDB pages and index rows."""
    num_pages = -(-(stored_length + _PAGE_HEADER_BYTES) // _PAGE_BYTES)
    return num_pages * _PAGE_BYTES + _INDEX_BYTES


def refuse_oversized(blobs: Iterable[Blob], capacity_bytes: int) -> None:
    """ValueError if one of *blobs* could not be stored even in an empty store."""
    for blob in blobs:
        if charged_bytes(blob.raw.nbytes) > capacity_bytes:
            raise ValueError(
                f"store: a block of {blob.raw.nbytes} bytes does not fit a capacity of {capacity_bytes}; "
                "raise capacity_bytes or use smaller blocks"
            )


def seal(blob: Blob, codec: Codec) -> Sealed:
    """*blob* ready to store. Written raw where *codec* gains nothing, so never longer than raw."""
    payload = codec.encode(blob.raw)
    if payload.nbytes >= blob.raw.nbytes:
        codec, payload = NO_CODEC, blob.raw
    record = Record(
        namespace=blob.key[:NAMESPACE_BYTES],
        codec_id=codec.codec_id,
        raw_length=blob.raw.nbytes,
        stored_length=payload.nbytes,
        digest=blob.digest,
    )
    return Sealed(blob.key, record.pack(blob.key), payload, charged_bytes(payload.nbytes))


def unseal(key: bytes, header: bytes, payload: memoryview, out: memoryview) -> bytes | Fault:
    """Decode *payload* into *out*, verify *out*, and return its digest; or what is wrong."""
    record = Record.unpack(key, header)
    if isinstance(record, Fault):
        return record
    codec = codec_by_id(record.codec_id)
    if codec is None:
        return Fault.VERSION
    if record.stored_length != payload.nbytes or record.raw_length != out.nbytes:
        return Fault.TORN

    try:
        codec.decode(payload, out)
    except ValueError:
        return Fault.CORRUPT
    return record.digest if digest(out) == record.digest else Fault.CORRUPT


def fault_of(key: bytes, header: bytes, payload: memoryview) -> Fault | None:
    """What is wrong with a stored record, None if nothing; decodes into memory of its own."""
    record = Record.unpack(key, header)
    if isinstance(record, Fault):
        return record
    result = unseal(key, header, payload, memoryview(bytearray(record.raw_length)))
    return result if isinstance(result, Fault) else None
