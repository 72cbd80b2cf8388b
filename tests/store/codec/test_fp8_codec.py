"""The lossy codec keeps the bounds it states, for any bits that can be in a block."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.store.codec.codec import CODECS, Codec
from kvtier.store.codec.fp8_codec import CODES, VALUES

FP8 = [codec for codec in CODECS.values() if codec.name.startswith("fp8-")]
DTYPES = {"fp8-bf16": np.uint16, "fp8-fp16": np.float16, "fp8-fp32": np.float32}  # numpy has no bfloat16
LARGEST = {"fp8-bf16": float.fromhex("0x1.fep127"), "fp8-fp16": 65504.0, "fp8-fp32": float.fromhex("0x1.fffffep127")}
FLOOR = {"fp8-bf16": 2.0**-121, "fp8-fp16": 2.0**-25, "fp8-fp32": 2.0**-121}

of_every_element = pytest.mark.parametrize("codec", FP8, ids=lambda codec: codec.name)
bounded = settings(max_examples=200, deadline=None)


def to_bytes(codec: Codec, values: npt.ArrayLike) -> bytes:
    """*values* in the codec's element type; cut off, not rounded, for bfloat16."""
    with np.errstate(over="ignore"):
        if codec.name == "fp8-bf16":
            return (np.asarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return np.asarray(values).astype(DTYPES[codec.name]).tobytes()


def to_floats(codec: Codec, raw: bytes) -> npt.NDArray[np.float64]:
    elements = np.frombuffer(raw, dtype=DTYPES[codec.name])
    if codec.name == "fp8-bf16":
        elements = (elements.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return elements.astype(np.float64)


def round_trip(codec: Codec, raw: bytes) -> bytes:
    out = bytearray(len(raw))
    codec.decode(codec.encode(memoryview(raw)), memoryview(out))
    return bytes(out)


def assert_within_bounds(codec: Codec, raw: bytes) -> None:
    put, got = to_floats(codec, raw), to_floats(codec, round_trip(codec, raw))
    largest, floor = LARGEST[codec.name], FLOOR[codec.name]
    for start in range(0, put.size, 64):
        x, y = put[start : start + 64], got[start : start + 64]
        m = max((min(abs(value), largest) for value in x if not np.isnan(value)), default=0.0)
        assert (np.isnan(x) == np.isnan(y)).all()
        x, y = x[~np.isnan(x)], y[~np.isnan(y)]
        x = np.clip(x, -largest, largest)  # infinities
        error = np.abs(x - y)

        assert (error <= m / 25 + floor).all()
        assert (error <= np.where(np.abs(x) > m / 28_000, np.abs(x) / 15, m) + floor).all()
        assert (y[x == 0] == 0).all()


@of_every_element
@bounded
@given(raw=st.binary(max_size=800))
def test_any_bits_come_back_within_the_bounds(codec: Codec, raw: bytes) -> None:
    element_bytes = np.dtype(DTYPES[codec.name]).itemsize

    assert_within_bounds(codec, raw[: len(raw) // element_bytes * element_bytes])


@of_every_element
@bounded
@given(seed=st.integers(0, 1 << 32), exponent=st.integers(-150, 127), num_elements=st.integers(1, 300))
@example(seed=0, exponent=-117, num_elements=64)
@example(seed=0, exponent=-149, num_elements=64)
def test_values_of_any_size_come_back_within_the_bounds(
    codec: Codec, seed: int, exponent: int, num_elements: int
) -> None:
    values = np.random.default_rng(seed).standard_normal(num_elements) * 2.0**exponent

    with np.errstate(over="ignore"):
        assert_within_bounds(codec, to_bytes(codec, values.astype(np.float32)))


@of_every_element
def test_every_exponent_comes_back_within_the_bounds_beside_every_other(codec: Codec) -> None:
    rng = np.random.default_rng(5)
    values = np.ldexp(rng.uniform(-2, 2, (2000, 64)), rng.integers(-149, 127, (2000, 64)))

    assert_within_bounds(codec, to_bytes(codec, values.astype(np.float32)))


@of_every_element
def test_many_chunks_and_a_part_of_a_run_come_back_within_the_bounds(codec: Codec) -> None:
    values = np.random.default_rng(6).standard_normal(2 * 32_768 + 64 + 7, dtype=np.float32)

    assert_within_bounds(codec, to_bytes(codec, values))


@of_every_element
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.0, 60_000.0, 2.0**-24, float("inf"), float("-inf"), float("nan")])
def test_a_constant_run_comes_back_within_a_hundredth(codec: Codec, value: float) -> None:
    raw = to_bytes(codec, np.full(64, value, dtype=np.float32))

    got = to_floats(codec, round_trip(codec, raw))

    largest = LARGEST[codec.name]
    np.testing.assert_allclose(got, np.clip(to_floats(codec, raw), -largest, largest), rtol=0.01, atol=0)
    assert (np.signbit(got) == np.signbit(value)).all() or np.isnan(value)


@of_every_element
def test_nan_leaves_the_rest_of_its_run_as_good_as_without(codec: Codec) -> None:
    values = np.random.default_rng(7).standard_normal(64, dtype=np.float32)
    expected = to_floats(codec, round_trip(codec, to_bytes(codec, np.where(np.arange(64) == 9, 0, values))))
    values[9] = np.nan

    got = to_floats(codec, round_trip(codec, to_bytes(codec, values)))

    assert np.isnan(got[9])
    assert np.array_equal(np.delete(got, 9), np.delete(expected, 9))


@of_every_element
def test_what_was_decoded_once_is_nearly_what_it_decodes_to_again(codec: Codec) -> None:
    once = round_trip(codec, to_bytes(codec, np.random.default_rng(8).standard_normal(6400, dtype=np.float32)))

    assert_within_bounds(codec, once)
    assert round_trip(codec, once) == round_trip(codec, once)


@of_every_element
def test_a_block_of_half_an_element_is_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match="whole number of elements"):
        codec.encode(memoryview(bytes(401)))


def test_payloads_have_one_byte_an_element_and_two_a_run() -> None:
    sizes = {codec.name: codec.encode(memoryview(bytes(1 << 20))).nbytes for codec in FP8}

    assert sizes == {"fp8-bf16": 540_672, "fp8-fp16": 540_672, "fp8-fp32": 270_336}


def test_the_codes_are_those_of_e4m3_elsewhere() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    patterns = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    codes = torch.from_numpy(patterns.clip(-448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    assert np.array_equal(VALUES, values, equal_nan=True)
    is_number = ~np.isnan(patterns)
    differs = patterns[(codes != CODES) & is_number]
    assert np.isnan(VALUES[CODES[~is_number]]).all()
    assert differs.size == 2 * 63  # midway between two codes: here away from zero, there to the even one
    numbers, mine, other = patterns[is_number], VALUES[CODES[is_number]], values[codes[is_number]]
    np.testing.assert_array_equal(np.abs(numbers - mine), np.abs(numbers - other))
