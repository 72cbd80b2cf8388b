"""`Fp8Codec`: a lossy codec that stores 8 bits per float, and a scale for each 64 floats."""

import sys
from typing import Literal

import numpy as np
import numpy.typing as npt

assert sys.byteorder == "little", "the fp8 codec views 32-bit floats as pairs of 16 bits; use a little-endian machine"

_RUN = 64  # elements that share a scale
_CHUNK = 32_768  # elements converted at a time, a multiple of _RUN: as float32 they fit the L2 cache
_LARGEST = 448.0  # largest number of e4m3
_SMALLEST_SCALE = 0x0080  # bits of the smallest normal bfloat16, 2^-126, so that 1 / scale is finite
_CODEC_IDS = {"bf16": 33, "fp16": 34, "fp32": 35}
_INFINITIES = {"bf16": 0x7F80, "fp16": 0x7C00, "fp32": 0x7F80_0000}

_Bits = npt.NDArray[np.unsignedinteger]
_Floats = npt.NDArray[np.float32]


class Fp8Codec:
    """A LOSSY codec: e4m3 (4 exponent bits, 3 mantissa bits) per element, and a bfloat16 scale per 64 elements.

    The payload has the scales, then the codes. 16-bit elements shrink 1.94 times, float32 3.88 times.

    Errors depend on m, the largest finite magnitude among the 64 elements that share a scale. An element's error is at
    most m / 25: half of the widest step of e4m3 is m / 28, and the rest is rounding. If the element is above
    m / 28,000, the error is also at most 1/15 of the element. Both limits ignore errors of up to 2^-25 in float16, or
    2^-121 in the other types, which come from the limited range of exponents.

    Zeros decode to zeros and NaN to NaN. An infinity decodes to a finite number of the same sign, whose
    magnitude is at least 24/25 of the largest finite number of the block's dtype.

    The codec must not share a namespace with lossless codecs, because a key would have two contents. So the caller
    names the codec in `Namespace.kv_quantization`.

    One core encodes 1.1 GB/s of bfloat16, 0.7 of float16 and 2.3 of float32, and decodes 1.8, 0.85 and 4.2 GB/s. Both
    conversions are table lookups: `ml_dtypes` takes 4 times as long to encode and 7 times as long to decode.
    """

    is_lossless = False
    is_fixed_length = True

    def __init__(self, element: Literal["bf16", "fp16", "fp32"]) -> None:
        self.codec_id = _CODEC_IDS[element]
        self.name = f"fp8-{element}"
        self._element = element
        self._dtype: np.dtype[np.unsignedinteger] = np.dtype("<u4" if element == "fp32" else "<u2")
        self._infinity = self._dtype.type(_INFINITIES[element])
        self._magnitude = self._dtype.type((1 << 8 * self._dtype.itemsize - 1) - 1)  # all bits but the sign

    def encode(self, raw: memoryview) -> memoryview:
        elements = self._elements_of(raw)
        num_scale_bytes = 2 * _num_runs(elements.size)
        payload = np.empty(num_scale_bytes + elements.size, dtype=np.uint8)
        scales, codes = payload[:num_scale_bytes].view(np.uint16), payload[num_scale_bytes:]

        for start in range(0, elements.size, _CHUNK):
            part = slice(start, min(start + _CHUNK, elements.size))
            runs = _in_runs(elements[part])
            scale_bits = self._scales_of(runs)
            scales[start // _RUN :][: len(runs)] = scale_bits
            with np.errstate(all="ignore"):  # NaN and infinities
                scaled = self._widen(runs) * (1 / _widen_bfloat16(scale_bits))[:, np.newaxis]
            # The upper 16 bits of a float32 suffice: steps of e4m3 and their midpoints have no bits in the lower 16.
            codes[part] = CODES.take(scaled.view(np.uint16)[:, 1::2], mode="clip").ravel()[: part.stop - start]
        return payload.data

    def decode(self, payload: memoryview, out: memoryview) -> None:
        elements = self._elements_of(out)
        num_scale_bytes = 2 * _num_runs(elements.size)
        if payload.nbytes != num_scale_bytes + elements.size:
            raise ValueError(f"{self.name}: a payload of {payload.nbytes} bytes is wrong for a block of {out.nbytes}")
        stored = np.frombuffer(payload, dtype=np.uint8)
        scales, codes = stored[:num_scale_bytes].view(np.uint16), stored[num_scale_bytes:]

        for start in range(0, elements.size, _CHUNK):
            part = slice(start, min(start + _CHUNK, elements.size))
            runs = _in_runs(codes[part])
            scale = _widen_bfloat16(scales[start // _RUN :][: len(runs)])
            with np.errstate(all="ignore"):  # a damaged scale
                values = VALUES.take(runs, mode="clip") * scale[:, np.newaxis]
                self._narrow(values.ravel()[: part.stop - start], elements[part])

    def _elements_of(self, raw: memoryview) -> _Bits:
        """Return the bits of each element of *raw* as an unsigned number, without copying."""
        if raw.nbytes % self._dtype.itemsize:
            raise ValueError(f"{self.name}: a block of {raw.nbytes} bytes is not a whole number of elements")
        elements: _Bits = np.frombuffer(raw, dtype=self._dtype)
        return elements

    def _scales_of(self, runs: _Bits) -> npt.NDArray[np.uint16]:
        """Return the bits of a bfloat16 scale for each of *runs* [num_runs, 64].

        Scales are rounded down, so that the largest element does not decode to infinity.
        """
        magnitudes = runs & self._magnitude  # as integers they have the order of the floats
        largest = magnitudes.max(axis=1)
        if largest.max() >= self._infinity:
            largest = np.where(magnitudes > self._infinity, self._dtype.type(0), magnitudes).max(axis=1)  # no NaN
            largest = np.minimum(largest, self._infinity - self._dtype.type(1))
        upper_halves: _Bits = (self._widen(largest) / np.float32(_LARGEST)).view(np.uint32) >> np.uint32(16)
        return np.maximum(upper_halves, _SMALLEST_SCALE).astype(np.uint16)

    def _widen(self, bits: _Bits) -> _Floats:
        if self._element == "bf16":
            return _widen_bfloat16(bits)
        if self._element == "fp16":
            return bits.view(np.float16).astype(np.float32)
        return bits.view(np.float32)

    def _narrow(self, values: _Floats, elements: _Bits) -> None:
        """Round *values* to the element type, and write them into *elements*."""
        if self._element == "bf16":
            elements[:] = (values.view(np.uint32) + np.uint32(0x8000)) >> 16
        elif self._element == "fp16":
            elements.view(np.float16)[:] = values
        else:
            elements.view(np.float32)[:] = values


def _num_runs(num_elements: int) -> int:
    return -(-num_elements // _RUN)


def _in_runs(elements: _Bits) -> _Bits:
    missing = -elements.size % _RUN
    return (np.pad(elements, (0, missing)) if missing else elements).reshape(-1, _RUN)


def _widen_bfloat16(bits: _Bits) -> _Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _values_of_codes() -> _Floats:
    """Return the value of each of the 256 codes of e4m3 (variant "fn": no infinities, one NaN of each sign)."""
    codes = np.arange(128)
    exponents, mantissas = codes >> 3, codes & 7
    magnitudes = np.where(exponents > 0, 8 + mantissas, mantissas) * 2.0 ** (np.maximum(exponents, 1) - 10)
    magnitudes[127] = np.nan
    return np.concatenate([magnitudes, -magnitudes]).astype(np.float32)


def _codes_of_upper_halves(values: _Floats) -> npt.NDArray[np.uint8]:
    """Return a table from the upper 16 bits of a float32 to the nearest e4m3 code (the largest one at overflow)."""
    magnitudes = _widen_bfloat16(np.arange(1 << 15, dtype=np.uint16))
    middles = (values[:126] + values[1:127]) / 2
    codes = np.searchsorted(middles, magnitudes, side="right").astype(np.uint8)
    codes[np.isnan(magnitudes)] = 127
    return np.concatenate([codes, codes | np.uint8(0x80)])


VALUES = _values_of_codes()
CODES = _codes_of_upper_halves(VALUES)
