"""Segments as bytes: what was packed is found again, and nothing else is ever made of any bytes."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.store.record import NAMESPACE_BYTES
from kvtier.store.remote.objects.segment import Entry, checksum, footer_bytes, pack, read_footer
from kvtier.store.remote_store import RemoteRecord

NAMESPACE = b"n" * NAMESPACE_BYTES

bounded = settings(deadline=None)

RECORDS = st.lists(
    st.builds(
        RemoteRecord,
        key=st.binary(max_size=80).map(lambda name: NAMESPACE + name),
        header=st.binary(max_size=20),
        payload=st.binary(max_size=60).map(memoryview),
    ),
    min_size=1,
    max_size=12,
)


def read(data: bytes, namespace: bytes = NAMESPACE) -> list[Entry]:
    return read_footer(memoryview(data), len(data), namespace)


def packed_bytes(records: list[RemoteRecord]) -> bytes:
    return bytes(pack(records).data)


@bounded
@given(RECORDS)
def test_what_was_packed_is_where_the_footer_says(records: list[RemoteRecord]) -> None:
    packed = pack(records)

    entries = read(bytes(packed.data))

    assert entries == packed.entries
    values = [bytes(packed.data)[entry.start : entry.start + entry.num_bytes] for entry in entries]
    assert values == [record.header + bytes(record.payload) for record in records]
    assert [entry.key for entry in entries] == [record.key for record in records]
    assert [entry.checksum for entry in entries] == [checksum(value) for value in values]


@bounded
@given(RECORDS)
def test_the_footer_alone_is_enough(records: list[RemoteRecord]) -> None:
    packed = pack(records)

    num_bytes = footer_bytes(memoryview(bytes(packed.data))[-40:])

    assert num_bytes is not None
    footer = memoryview(bytes(packed.data))[-num_bytes:]
    assert read_footer(footer, len(bytes(packed.data)), NAMESPACE) == packed.entries
    assert read_footer(footer[1:], len(bytes(packed.data)), NAMESPACE) == []


@bounded
@given(RECORDS, st.data())
def test_a_flipped_bit_of_the_footer_is_seen(records: list[RemoteRecord], data: st.DataObject) -> None:
    packed = pack(records)
    damaged = bytearray(bytes(packed.data))
    num_bytes = footer_bytes(memoryview(bytes(packed.data)))
    assert num_bytes is not None
    at = data.draw(st.integers(len(damaged) - num_bytes, len(damaged) - 1))
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))

    assert read(bytes(damaged)) == []


@bounded
@given(RECORDS, st.data())
def test_a_segment_that_lacks_bytes_or_has_more_is_none(records: list[RemoteRecord], data: st.DataObject) -> None:
    whole = packed_bytes(records)
    kept = data.draw(st.integers(0, len(whole) - 1))

    assert read(whole[:kept]) == []
    assert read(whole + b"x") == []
    assert read(b"x" + whole) == []


@bounded
@given(RECORDS)
def test_a_segment_of_another_namespace_is_none(records: list[RemoteRecord]) -> None:
    assert read(packed_bytes(records), b"m" * NAMESPACE_BYTES) == []


@bounded
@given(st.binary(max_size=300), st.integers(0, 2**32 - 1))
def test_a_footer_that_somebody_made_up_gives_entries_within_the_segment_or_none(middle: bytes, count: int) -> None:
    """With a checksum that is right, as whoever may write there can compute one."""
    for num_entries in (count, len(middle) // 18):
        fields = struct.pack("<4sHIQ", b"KVTS", 1, num_entries, len(middle))
        forged = middle + fields + checksum(middle + fields, NAMESPACE)

        for data in (forged, bytes(100) + forged):
            entries = read(data)
            assert all(0 <= entry.start <= entry.start + entry.num_bytes <= len(data) for entry in entries)


@bounded
@given(st.binary(max_size=200))
def test_bytes_that_are_no_segment_are_none(data: bytes) -> None:
    assert read(data) == []


@pytest.mark.parametrize("entry_bytes", [1 << 40, 2**64 - 1])
def test_a_footer_that_claims_to_be_huge_is_not_asked_for(entry_bytes: int) -> None:
    tail = struct.pack("<4sHIQ", b"KVTS", 1, 1, entry_bytes) + bytes(8)

    assert footer_bytes(memoryview(tail)) is None
