"""Codecs by themselves: what decodes is what was encoded, smaller where promised, and nothing from disk is trusted."""

import random
import threading

import pytest
from store_cases import kv_bytes

from kvtier.store.codec.codec import CODEC_BY_ID, CODECS, Codec, NoCodec, ZstdPlaneCodec

LOSSLESS = [codec for codec in CODECS.values() if codec.is_lossless]
PLANES = [codec for codec in CODECS.values() if isinstance(codec, ZstdPlaneCodec)]


def name_of(codec: Codec) -> str:
    return codec.name


def test_no_codec_hands_on_the_same_memory() -> None:
    raw = memoryview(bytearray(b"block"))

    payload = NoCodec().encode(raw)
    raw[0] = 0

    assert payload[0] == 0


@pytest.mark.parametrize("codec", LOSSLESS, ids=name_of)
def test_decoding_gives_back_what_was_encoded(codec: Codec) -> None:
    for raw in (kv_bytes(1, 64_000), bytes(4096), random.Random(1).randbytes(4000)):
        out = bytearray(len(raw))

        codec.decode(codec.encode(memoryview(raw)), memoryview(out))

        assert out == raw


def test_bfloat16_shrinks_to_seven_tenths() -> None:
    raw = memoryview(kv_bytes(1, 1 << 20))

    assert ZstdPlaneCodec(2).encode(raw).nbytes < 0.72 * raw.nbytes


@pytest.mark.parametrize("codec", PLANES, ids=name_of)
def test_a_damaged_payload_raises_or_decodes_to_the_block_s_length(codec: Codec) -> None:
    payload = bytes(codec.encode(memoryview(kv_bytes(1, 4000))))
    num_refused = 0
    for position in range(len(payload)):
        damaged = bytearray(payload)
        damaged[position] ^= 0x80
        try:
            codec.decode(memoryview(damaged), memoryview(bytearray(4000)))
        except ValueError:
            num_refused += 1

    assert num_refused > 0


@pytest.mark.parametrize("codec", CODECS.values(), ids=name_of)
@pytest.mark.parametrize("num_bytes", [0, 1, 1000])
def test_a_payload_too_short_is_refused(codec: Codec, num_bytes: int) -> None:
    payload = codec.encode(memoryview(kv_bytes(1, 4000)))

    with pytest.raises(ValueError, match=r".+"):
        codec.decode(payload[:num_bytes], memoryview(bytearray(4000)))


def test_a_block_of_half_an_element_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number of elements"):
        ZstdPlaneCodec(2).encode(memoryview(b"abc"))


def test_codecs_are_found_by_the_number_in_the_record() -> None:
    assert [CODEC_BY_ID[codec.codec_id] for codec in CODECS.values()] == list(CODECS.values())
    assert 999 not in CODEC_BY_ID
    assert {codec.name: codec.codec_id for codec in CODECS.values()} == {  # on disk: for ever
        "none": 0,
        "zstd-plane-1": 17,
        "zstd-plane-2": 18,
        "zstd-plane-4": 20,
        "fp8-bf16": 33,
        "fp8-fp16": 34,
        "fp8-fp32": 35,
    }


@pytest.mark.parametrize("codec", CODECS.values(), ids=name_of)
def test_a_codec_of_fixed_length_gives_every_block_of_a_length_the_same(codec: Codec) -> None:
    blocks = [kv_bytes(1, 64_000), bytes(64_000), random.Random(1).randbytes(64_000)]

    lengths = {codec.encode(memoryview(raw)).nbytes for raw in blocks}

    assert (len(lengths) == 1) == codec.is_fixed_length


def test_one_codec_serves_several_threads() -> None:
    codec = ZstdPlaneCodec(2)
    wrong: list[int] = []

    def work(number: int) -> None:
        raw = kv_bytes(number, 100_000)
        for _ in range(20):
            out = bytearray(len(raw))
            codec.decode(codec.encode(memoryview(raw)), memoryview(out))
            if out != raw:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
