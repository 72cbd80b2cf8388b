"""The format of segments: the records of consecutive blocks, and a footer that says where each record is.

This module only converts bytes; it does no I/O.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from kvtier.store.record import NAMESPACE_BYTES
from kvtier.store.remote_store import RemoteRecord

_MAGIC = b"KVTS"
_VERSION = 1
_ENTRY = struct.Struct("<HQ8s")  # bytes of the key after its namespace, bytes of the value, checksum of the value
_FIELDS = struct.Struct("<4sHIQ")  # magic, version, number of entries, bytes of the entries
_CHECKSUM_BYTES = 8
_TRAILER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
_MAX_FOOTER_BYTES = 4 << 20  # 70,000 blocks; segments have 256 on average, so a larger footer is not from kvtier


class Entry(NamedTuple):
    """An entry of a footer: the byte range of a key's value in its segment, and the value's checksum."""

    key: bytes
    start: int
    num_bytes: int
    checksum: bytes


class Packed(NamedTuple):
    """The bytes of a segment (an object that holds consecutive blocks), and the entries of its footer."""

    data: memoryview
    entries: list[Entry]


def checksum(*parts: bytes | memoryview) -> bytes:
    """Return xxh3_64 of the concatenated *parts*. It detects damage, not tampering."""
    running = xxhash.xxh3_64()
    for part in parts:
        running.update(part)
    return running.digest()


def pack(records: Sequence[RemoteRecord]) -> Packed:
    """Return the segment of *records*, which belong to one namespace. The segment contains a copy of the payloads."""
    entries = list(_entries_of(records))
    footer = _footer(entries, records[0].key[:NAMESPACE_BYTES])
    value_bytes = sum(entry.num_bytes for entry in entries)
    data = np.empty(value_bytes + len(footer), dtype=np.uint8)  # numpy copies without the GIL
    for record, entry in zip(records, entries, strict=True):
        payload = entry.start + len(record.header)
        data[entry.start : payload] = np.frombuffer(record.header, dtype=np.uint8)
        data[payload : entry.start + entry.num_bytes] = record.payload
    data[value_bytes:] = np.frombuffer(footer, dtype=np.uint8)
    return Packed(data.data, entries)


def _footer(entries: Sequence[Entry], namespace: bytes) -> bytes:
    packed = b"".join(
        _ENTRY.pack(len(entry.key) - NAMESPACE_BYTES, entry.num_bytes, entry.checksum) + entry.key[NAMESPACE_BYTES:]
        for entry in entries
    )
    fields = _FIELDS.pack(_MAGIC, _VERSION, len(entries), len(packed))
    return packed + fields + checksum(packed, fields, namespace)


def footer_bytes(tail: memoryview) -> int | None:
    """Return the size of a segment's footer, judged by the segment's last bytes, or None if it is not a segment."""
    if len(tail) < _TRAILER_BYTES:
        return None
    magic, version, _, entry_bytes = _FIELDS.unpack_from(tail, len(tail) - _TRAILER_BYTES)
    if (magic, version) != (_MAGIC, _VERSION) or entry_bytes > _MAX_FOOTER_BYTES:
        return None
    return _TRAILER_BYTES + int(entry_bytes)


def read_footer(tail: memoryview, segment_bytes: int, namespace: bytes) -> list[Entry]:
    """Return the entries in the footer at the end of *tail*, or an empty list if the footer is invalid.

    *tail* is the last part of a segment of *segment_bytes*. A footer is invalid if it is damaged, if it belongs to
    another *namespace*, or if its entries do not account for every byte of the segment.
    """
    num_bytes = footer_bytes(tail)
    if num_bytes is None or num_bytes > len(tail):
        return []
    footer = tail[len(tail) - num_bytes :]
    signed, seal = footer[:-_CHECKSUM_BYTES], footer[-_CHECKSUM_BYTES:]
    if seal != checksum(signed, namespace):
        return []
    _, _, num_entries, _ = _FIELDS.unpack_from(signed, len(signed) - _FIELDS.size)
    entries = _unpack(signed[: -_FIELDS.size], namespace)
    value_bytes = entries[-1].start + entries[-1].num_bytes if entries else 0
    if len(entries) != num_entries or value_bytes != segment_bytes - num_bytes:
        return []
    return entries


def _entries_of(records: Sequence[RemoteRecord]) -> Iterator[Entry]:
    start = 0
    for record in records:
        num_bytes = len(record.header) + record.payload.nbytes
        yield Entry(record.key, start, num_bytes, checksum(record.header, record.payload))
        start += num_bytes


def _unpack(packed: memoryview, namespace: bytes) -> list[Entry]:
    """Return the entries in *packed*, or an empty list if the last entry is incomplete.

    The caller has verified the checksum of *packed*.
    """
    entries: list[Entry] = []
    at = start = 0
    while at + _ENTRY.size <= len(packed):
        key_bytes, num_bytes, known = _ENTRY.unpack_from(packed, at)
        at += _ENTRY.size
        entries.append(Entry(namespace + bytes(packed[at : at + key_bytes]), start, num_bytes, known))
        at += key_bytes
        start += num_bytes
    return entries if at == len(packed) else []
