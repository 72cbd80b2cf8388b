"""The sealed form of a block: its length and memory, its header, and what encryption adds."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import blob_of, key_of, kv_bytes

from kvtier.store.blob_store import Blob
from kvtier.store.codec.cipher import OVERHEAD_BYTES, Cipher
from kvtier.store.codec.codec import CODECS, NO_CODEC, Codec, ZstdPlaneCodec
from kvtier.store.codec.seal import Sealed, charged_bytes, check_fits, fault_of, seal, unseal, value_bytes
from kvtier.store.record import HEADER_BYTES, NO_DIGEST, Fault, Record, digest, plain_digest

ZSTD = CODECS["zstd-plane-2"]
CIPHERS = [None, Cipher(bytes(32))]

with_and_without_cipher = pytest.mark.parametrize("cipher", CIPHERS, ids=["plain", "encrypted"])
of_every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)


def record_of(sealed: Sealed) -> Record:
    record = Record.unpack(sealed.key, sealed.header)
    assert isinstance(record, Record)
    return record


def opened(sealed: Sealed, num_bytes: int, cipher: Cipher | None = None) -> tuple[bytes | Fault, bytes]:
    out = bytearray(num_bytes)
    return unseal(sealed.key, sealed.header, sealed.payload, memoryview(out), cipher), bytes(out)


def mixed_blob(share_of_noise: float, num_bytes: int = 1 << 20) -> Blob:
    """A block that shrinks the less, the more of it is noise."""
    raw = bytearray(num_bytes)
    num_noise_bytes = int(share_of_noise * num_bytes)
    raw[:num_noise_bytes] = random.Random(1).randbytes(num_noise_bytes)
    return Blob(key_of(1), digest(raw), memoryview(raw))


@with_and_without_cipher
@of_every_codec
@pytest.mark.parametrize("num_bytes", [0, 4, 1000, 4080, 4084, 20_000, 300_000])
def test_a_sealed_block_opens_as_what_its_codec_gives_back(codec: Codec, cipher: Cipher | None, num_bytes: int) -> None:
    blob = blob_of(1, num_bytes)

    sealed = seal(blob, codec, cipher)
    result, out = opened(sealed, num_bytes, cipher)

    assert result == digest(out)
    assert out == blob.raw or not codec.is_lossless
    assert fault_of(sealed.key, sealed.header, sealed.payload, cipher) is None
    assert len(sealed.header) == HEADER_BYTES <= 80
    assert sealed.charged_bytes == charged_bytes(sealed.payload.nbytes)
    assert sealed.payload.nbytes <= num_bytes + (0 if cipher is None else OVERHEAD_BYTES)


def test_the_digest_of_a_raw_block_is_that_of_its_header_and_no_damaged_or_other_header_has_one() -> None:
    sealed = seal(blob_of(1, 5000), NO_CODEC)
    damaged = [bytes([*sealed.header[:i], byte ^ 1, *sealed.header[i + 1 :]]) for i, byte in enumerate(sealed.header)]

    assert plain_digest(sealed.key, sealed.header, 5000) == record_of(sealed).digest
    assert {plain_digest(sealed.key, header, 5000) for header in [*damaged, b"", sealed.header + b" "]} == {None}
    assert plain_digest(key_of(2), sealed.header, 5000) is None
    assert plain_digest(sealed.key, sealed.header, 5001) is None
    for other in (seal(blob_of(1, 300_000), ZSTD), seal(blob_of(1, 300_000), NO_CODEC, CIPHERS[1])):
        assert plain_digest(other.key, other.header, 300_000) is None


def test_a_block_that_is_not_encoded_stays_the_caller_s_memory() -> None:
    blob = blob_of(1, 4096)
    incompressible = Blob(key_of(2), bytes(16), memoryview(random.Random(1).randbytes(4096)))

    for one, codec in ((blob, NO_CODEC), (incompressible, ZSTD)):
        sealed = seal(one, codec)

        assert sealed.payload.obj is one.raw.obj
        assert sealed.payload.nbytes == 4096


def test_blocks_of_one_length_are_stored_in_few_lengths_of_whole_pages() -> None:
    raw_bytes = 1 << 20
    lengths = {seal(mixed_blob(share / 100), ZSTD).payload.nbytes for share in range(0, 100, 3)} - {raw_bytes}

    assert 3 <= len(lengths) <= 7
    assert all(length % 4096 == 0 and length < raw_bytes for length in lengths)
    assert all(charged_bytes(length) < charged_bytes(raw_bytes) for length in lengths)


@settings(max_examples=200, deadline=None)
@given(raw_length=st.integers(1, 5 << 20), share=st.floats(0, 1))
def test_a_class_holds_the_payload_and_wastes_at_most_an_eighth_and_a_page(raw_length: int, share: float) -> None:
    stored_length = int(share * raw_length)

    length = value_bytes(ZSTD, stored_length, raw_length)

    assert stored_length <= length <= stored_length + raw_length / 8 + 4096
    assert length % 4096 == 0


@pytest.mark.parametrize("codec", [codec for codec in CODECS.values() if codec.is_fixed_length])
def test_payloads_of_one_length_are_not_padded(codec: Codec) -> None:
    assert value_bytes(codec, 12_345, 20_000) == 12_345


def test_the_padding_is_zeros_and_the_header_has_the_length_without_it() -> None:
    blob = blob_of(1, 100_000)

    sealed = seal(blob, ZSTD)

    stored_length = record_of(sealed).stored_length
    assert stored_length == ZSTD.encode(blob.raw).nbytes < sealed.payload.nbytes
    assert bytes(sealed.payload[stored_length:]) == bytes(sealed.payload.nbytes - stored_length)


@with_and_without_cipher
def test_the_padding_is_not_looked_at(cipher: Cipher | None) -> None:
    blob = blob_of(1, 100_000)
    sealed = seal(blob, ZSTD, cipher)

    sealed.payload[-1] ^= 1

    assert opened(sealed, 100_000, cipher) == (blob.digest, bytes(blob.raw))


@with_and_without_cipher
@of_every_codec
def test_a_value_cut_short_is_torn_and_what_follows_it_is_not_looked_at(codec: Codec, cipher: Cipher | None) -> None:
    sealed = seal(blob_of(1, 100_000), codec, cipher)
    value, length = bytes(sealed.payload), record_of(sealed).stored_length

    for other in (b"", value[:1], value[: length - 1]):
        assert opened(Sealed(sealed.key, sealed.header, memoryview(other), 0), 100_000, cipher)[0] == Fault.TORN
    right = opened(sealed, 100_000, cipher)
    for other in (value[:length], value + b"?", 2 * value):
        assert opened(Sealed(sealed.key, sealed.header, memoryview(other), 0), 100_000, cipher) == right


def test_a_block_of_seven_tenths_takes_six_eighths_of_the_pages() -> None:
    for num_bytes in (1 << 16, 1 << 20, 576 << 10):
        assert seal(blob_of(1, num_bytes), ZSTD).payload.nbytes == num_bytes * 6 // 8


def test_a_codec_that_saves_less_than_an_eighth_is_not_used() -> None:
    blob = mixed_blob(0.93)

    assert ZSTD.encode(blob.raw).nbytes < 0.98 * blob.raw.nbytes
    assert seal(blob, ZSTD).payload == blob.raw


def test_a_codec_that_saves_no_page_is_not_used() -> None:
    blob = blob_of(1, 4000)  # its payload is shorter, and takes a page like the block itself

    assert ZSTD.encode(blob.raw).nbytes < 3000
    assert record_of(seal(blob, ZSTD)).codec_id == NO_CODEC.codec_id


@pytest.mark.parametrize("codec", [codec for codec in CODECS.values() if not codec.is_lossless])
def test_a_lossy_record_has_the_digest_of_what_it_decodes_to(codec: Codec) -> None:
    blob = blob_of(1, 100_000)
    expected = bytearray(100_000)
    codec.decode(codec.encode(blob.raw), memoryview(expected))

    sealed = seal(blob, codec)

    assert record_of(sealed).digest == digest(expected) != blob.digest
    assert opened(sealed, 100_000) == (digest(expected), expected)


@with_and_without_cipher
@of_every_codec
def test_bytes_damaged_before_they_were_sealed_are_found_when_opened(codec: Codec, cipher: Cipher | None) -> None:
    raw = bytearray(kv_bytes(1, 100_000))
    taken = digest(raw)
    raw[4711] ^= 0x40

    sealed = seal(Blob(key_of(1), taken, memoryview(raw)), codec, cipher)

    assert opened(sealed, 100_000, cipher)[0] == Fault.CORRUPT


@of_every_codec
def test_nothing_of_an_encrypted_record_depends_on_the_block_s_bytes(codec: Codec) -> None:
    cipher = Cipher(bytes(32))
    blob = blob_of(1, 100_000)

    sealed = seal(blob, codec, cipher)

    record = record_of(sealed)
    assert (record.digest, record.key_id, record.cipher_id) == (NO_DIGEST, cipher.key_id, cipher.cipher_id)
    payload = codec.encode(blob.raw)
    for text in (bytes(payload[:32]), bytes(payload[5000:5032]), blob.digest):
        assert text not in bytes(sealed.payload)
        assert text not in sealed.header


def test_a_record_of_another_key_or_of_none_is_of_a_key_and_not_bad() -> None:
    one, other = Cipher(bytes(32)), Cipher(bytes([1]) * 32)
    blob = blob_of(1, 1000)

    for written_with, read_with in ((one, other), (one, None), (None, one)):
        sealed = seal(blob, NO_CODEC, written_with)

        assert opened(sealed, 1000, read_with)[0] == Fault.KEY
        assert fault_of(sealed.key, sealed.header, sealed.payload, read_with) == Fault.KEY

    assert not Fault.KEY.is_bad_record


def test_records_that_will_never_be_read_are_bad() -> None:
    fine = {fault for fault in Fault if not fault.is_bad_record}

    assert fine == {Fault.MISSING, Fault.KEY, Fault.IO_ERROR}


def test_a_length_that_no_block_has_is_torn() -> None:
    for raw_length in (1 << 62, (1 << 64) - 1):
        header = Record(key_of(1)[:16], 0, raw_length, 0, bytes(16)).pack(key_of(1))

        assert fault_of(key_of(1), header, memoryview(b"")) == Fault.TORN


def test_a_block_that_only_encryption_makes_too_long_is_refused() -> None:
    blob = blob_of(1, 4080)  # fills a page

    check_fits([blob], charged_bytes(4080))
    with pytest.raises(ValueError, match="raise capacity_bytes"):
        check_fits([blob], charged_bytes(4080), Cipher(bytes(32)))


def test_a_block_that_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number of elements"):
        seal(Blob(key_of(1), bytes(16), memoryview(bytes(1001))), ZstdPlaneCodec(2))


def test_a_block_opens_into_any_memory() -> None:
    blob = blob_of(1, 100_000)
    slab = np.zeros((3, 100_001), dtype=np.uint8)
    out = slab.reshape(-1)[100_003:200_003].data  # not aligned

    for codec in (NO_CODEC, ZSTD):
        for cipher in CIPHERS:
            sealed = seal(blob, codec, cipher)

            assert unseal(sealed.key, sealed.header, sealed.payload, out, cipher) == blob.digest
            assert out == blob.raw
