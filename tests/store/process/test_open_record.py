"""Nothing that stands in the store makes `unseal` raise or give wrong bytes, wherever it is damaged."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import NAMESPACE, blob_of, key_of

from kvtier.store.blob_store import Blob
from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import CODEC_BY_ID, CODECS, Codec
from kvtier.store.codec.seal import Sealed, fault_of, seal, unseal, value_bytes
from kvtier.store.record import HEADER_BYTES, Fault, Record, digest

RAW_BYTES = 20_000
HEADER_FIELDS = {
    "magic": slice(0, 4),
    "version": slice(4, 6),
    "codec": slice(6, 8),
    "cipher": slice(8, 9),
    "key id": slice(9, 17),
    "namespace": slice(17, 33),
    "raw length": slice(33, 41),
    "stored length": slice(41, 49),
    "digest": slice(49, 65),
    "checksum": slice(65, 73),
}
OWN = Cipher(bytes(32))
CASES = [(codec, cipher) for codec in CODECS.values() for cipher in (None, OWN)]

of_every_kind = pytest.mark.parametrize(
    ("codec", "cipher"),
    CASES,
    ids=[f"{codec.name}-{'plain' if cipher is None else 'encrypted'}" for codec, cipher in CASES],
)
bounded = settings(max_examples=200, deadline=None)


def opened(key: bytes, header: bytes, value: bytes, cipher: Cipher | None) -> tuple[bytes | Fault, bytes]:
    out = bytearray(RAW_BYTES)
    return unseal(key, header, memoryview(value), memoryview(out), cipher), bytes(out)


def flipped(data: bytes, position: int, bit: int = 0) -> bytes:
    damaged = bytearray(data)
    damaged[position] ^= 1 << bit
    return bytes(damaged)


def record_of(sealed: Sealed) -> Record:
    record = Record.unpack(sealed.key, sealed.header)
    assert isinstance(record, Record)
    return record


def right_bytes(blob: Blob, sealed: Sealed, cipher: Cipher | None) -> bytes:
    """What the undamaged record gives: the block, or what a lossy codec makes of it."""
    result, out = opened(sealed.key, sealed.header, bytes(sealed.payload), cipher)
    assert result == digest(out)
    return out


def test_the_fields_are_the_whole_header() -> None:
    positions = [position for field in HEADER_FIELDS.values() for position in range(field.start, field.stop)]

    assert positions == list(range(HEADER_BYTES))


@of_every_kind
@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_flip_in_the_header_is_a_fault(codec: Codec, cipher: Cipher | None, field: str) -> None:
    sealed = seal(blob_of(1), codec, cipher)
    value = bytes(sealed.payload)
    expected = {"version": Fault.VERSION, "namespace": Fault.FOREIGN}.get(field, Fault.CORRUPT)

    for position in range(HEADER_FIELDS[field].start, HEADER_FIELDS[field].stop):
        for bit in range(8):
            header = flipped(sealed.header, position, bit)

            assert opened(sealed.key, header, value, cipher)[0] == expected
            assert fault_of(sealed.key, header, memoryview(value), cipher) == expected


@of_every_kind
def test_a_flip_in_the_value_is_a_fault_or_in_the_padding(codec: Codec, cipher: Cipher | None) -> None:
    sealed = seal(blob_of(1), codec, cipher)
    value, stored_length = bytes(sealed.payload), record_of(sealed).stored_length
    right = right_bytes(blob_of(1), sealed, cipher)
    edges = (0, 11, 12, 27, 28, stored_length // 2, stored_length - 17, stored_length - 16, stored_length - 1)
    padding = range(stored_length, len(value), 97)

    for position in sorted({*edges, *range(0, stored_length, 311)}):
        assert opened(sealed.key, sealed.header, flipped(value, position), cipher)[0] == Fault.CORRUPT, position
    for position in padding:
        assert opened(sealed.key, sealed.header, flipped(value, position), cipher) == (digest(right), right)

    assert (len(padding) > 0) == (not codec.is_fixed_length and record_of(sealed).codec_id != 0)


@of_every_kind
def test_what_was_cut_off_is_torn(codec: Codec, cipher: Cipher | None) -> None:
    sealed = seal(blob_of(1), codec, cipher)
    value = bytes(sealed.payload)

    for num_left in range(HEADER_BYTES):
        assert opened(sealed.key, sealed.header[:num_left], value, cipher)[0] == Fault.TORN
    assert opened(sealed.key, sealed.header + b"\0", value, cipher)[0] == Fault.TORN
    for num_left in (*range(64), len(value) // 2, record_of(sealed).stored_length - 1):
        assert opened(sealed.key, sealed.header, value[:num_left], cipher)[0] == Fault.TORN


@of_every_kind
def test_zeros_in_place_of_a_part_are_a_fault(codec: Codec, cipher: Cipher | None) -> None:
    sealed = seal(blob_of(1), codec, cipher)
    value = bytes(sealed.payload)

    for start in range(0, record_of(sealed).stored_length, 4096):  # a page that never reached the disk
        lost = value[:start] + bytes(min(4096, len(value) - start)) + value[start + 4096 :]

        assert opened(sealed.key, sealed.header, lost, cipher)[0] == Fault.CORRUPT


@of_every_kind
def test_a_record_at_another_key_is_a_fault(codec: Codec, cipher: Cipher | None) -> None:
    one, two = seal(blob_of(1), codec, cipher), seal(blob_of(2), codec, cipher)
    foreign = seal(blob_of(1, namespace=b"model-B layout-1"), codec, cipher)

    assert opened(key_of(1), two.header, bytes(two.payload), cipher)[0] == Fault.CORRUPT
    assert opened(key_of(1), foreign.header, bytes(foreign.payload), cipher)[0] == Fault.FOREIGN
    # Half of another record; its value may be of another class, which shows first.
    assert opened(key_of(1), one.header, bytes(two.payload), cipher)[0] in (Fault.CORRUPT, Fault.TORN)
    assert opened(key_of(1), two.header, bytes(one.payload), cipher)[0] == Fault.CORRUPT


@of_every_kind
def test_a_header_with_another_field_and_a_right_checksum_gives_no_wrong_bytes(
    codec: Codec, cipher: Cipher | None
) -> None:
    sealed = seal(blob_of(1), codec, cipher)
    value, right = bytes(sealed.payload), right_bytes(blob_of(1), sealed, cipher)
    record = record_of(sealed)

    def forged(**fields: object) -> bytes | Fault:
        values = {name: getattr(record, name) for name in Record._fields} | fields
        result, out = opened(sealed.key, Record(**values).pack(sealed.key), value, cipher)
        assert isinstance(result, Fault) or out == right
        return result

    for other in CODECS.values():
        if other.codec_id != record.codec_id:
            assert forged(codec_id=other.codec_id) in (Fault.CORRUPT, Fault.TORN)
    assert forged(codec_id=999) == Fault.VERSION
    assert forged(cipher_id=2) == Fault.VERSION
    assert forged(cipher_id=1 - record.cipher_id) == Fault.KEY
    assert forged(key_id=b"otherkey") == Fault.KEY
    for length in (0, RAW_BYTES - 2, RAW_BYTES + 2, 1 << 40):
        assert forged(raw_length=length) == Fault.TORN
    for length in (0, 1, record.stored_length - 1, (1 << 64) - 1):
        assert forged(stored_length=length) in (Fault.CORRUPT, Fault.TORN)
    forged(stored_length=record.stored_length + 1)  # the right bytes, where zstd ends before
    assert forged(digest=b"another digest..") == Fault.CORRUPT
    with pytest.raises(struct.error):
        forged(codec_id=1 << 16)


def test_an_encrypted_record_moved_under_another_key_with_a_right_header_is_corrupt() -> None:
    sealed = seal(blob_of(1), CODECS["none"], OWN)
    header = record_of(sealed).pack(key_of(2))  # anybody can: the checksum is no secret

    assert opened(key_of(2), header, bytes(sealed.payload), OWN)[0] == Fault.CORRUPT


def test_headers_of_other_versions_are_of_a_version() -> None:
    sealed = seal(blob_of(1), CODECS["none"])
    value = bytes(sealed.payload)
    of_version_1 = struct.pack("<4sHH16sQQ16s8s", b"KVTR", 1, 0, NAMESPACE, RAW_BYTES, RAW_BYTES, bytes(16), bytes(8))

    for header in (of_version_1, b"KVTR\x03\x00", b"KVTR\x03\x00" + bytes(500), b"KVTR\xff\xff" + sealed.header[6:]):
        assert opened(sealed.key, header, value, None)[0] == Fault.VERSION
        assert fault_of(sealed.key, header, memoryview(value)) == Fault.VERSION
    for header in (b"KVTX" + sealed.header[4:], bytes(HEADER_BYTES), b"KVTX\x02\x00"):
        assert opened(sealed.key, header, value, None)[0] == Fault.CORRUPT
    for header in (b"", b"KVT", b"KVTR\x02", b"KVTR\x02\x00", sealed.header[:-1]):
        assert opened(sealed.key, header, value, None)[0] == Fault.TORN


def assert_nothing_wrong_comes_out(
    key: bytes, header: bytes, value: bytes, num_bytes: int, cipher: Cipher | None
) -> bytes | Fault:
    out = bytearray(num_bytes)
    result = unseal(key, header, memoryview(value), memoryview(out), cipher)
    assert isinstance(result, Fault) or result == digest(out)
    return result


keys = st.binary(max_size=100)
ciphers = st.sampled_from([None, OWN])


@bounded
@given(
    key=keys,
    header=st.binary(max_size=150),
    value=st.binary(max_size=300),
    num_bytes=st.integers(0, 300),
    cipher=ciphers,
)
def test_any_bytes_are_a_fault(key: bytes, header: bytes, value: bytes, num_bytes: int, cipher: Cipher | None) -> None:
    result = assert_nothing_wrong_comes_out(key, header, value, num_bytes, cipher)

    assert isinstance(result, Fault)
    assert isinstance(fault_of(key, header, memoryview(value), cipher), Fault)


@settings(max_examples=500, deadline=None)
@given(
    key=st.binary(min_size=16, max_size=100),
    codec_id=st.sampled_from([codec.codec_id for codec in CODECS.values()]) | st.integers(0, 65535),
    cipher=ciphers,
    is_encrypted=st.booleans(),
    raw_length=st.integers(0, 5000),
    start=st.binary(max_size=300),
    stored_length=st.integers(0, 5000),
    is_digest_of_start=st.booleans(),
)
def test_any_value_under_a_header_that_fits_it_gives_what_the_digest_says(
    key: bytes,
    codec_id: int,
    cipher: Cipher | None,
    is_encrypted: bool,
    raw_length: int,
    start: bytes,
    stored_length: int,
    is_digest_of_start: bool,
) -> None:
    known = digest(start[:raw_length].ljust(raw_length, b"\0")) if is_digest_of_start else bytes(16)
    ids = (OWN.cipher_id, OWN.key_id) if is_encrypted else (0, bytes(8))
    record = Record(key[:16], codec_id, raw_length, stored_length, known, *ids)
    codec = CODEC_BY_ID.get(codec_id)
    length = stored_length if codec is None else value_bytes(codec, stored_length, raw_length)
    value = start[:length].ljust(length, b"\0")

    result = assert_nothing_wrong_comes_out(key, record.pack(key), value, raw_length, cipher)

    assert isinstance(result, Fault) or cipher is None


@bounded
@given(
    codec=st.sampled_from(list(CODECS.values())),
    cipher=ciphers,
    num_bytes=st.sampled_from([400, 8000, 20_000]),
    part=st.sampled_from(["header", "value"]),
    position=st.floats(0, 1, exclude_max=True),
    new=st.binary(min_size=1, max_size=40),
)
def test_any_bytes_written_over_a_record_give_no_wrong_bytes(
    codec: Codec, cipher: Cipher | None, num_bytes: int, part: str, position: float, new: bytes
) -> None:
    blob = blob_of(1, num_bytes)
    sealed = seal(blob, codec, cipher)
    right = bytearray(num_bytes)
    known = unseal(sealed.key, sealed.header, sealed.payload, memoryview(right), cipher)
    header, value = bytearray(sealed.header), bytearray(sealed.payload)
    damaged = header if part == "header" else value
    start = int(position * len(damaged))
    damaged[start : start + len(new)] = new  # and longer, if it reaches beyond the end

    out = bytearray(num_bytes)
    result = unseal(sealed.key, bytes(header), memoryview(value), memoryview(out), cipher)

    assert isinstance(result, Fault) or (result, out) == (known, right)
