"""Codecs: the layouts of a block's bytes at rest."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from kvtier.store.codec.fp8_codec import Fp8Codec


class Codec(Protocol):
    """A layout of a block's bytes at rest. It is stateless, so one object serves all threads."""

    @property
    def codec_id(self) -> int:
        """The number stored in every record. It is never reused for another layout."""

    @property
    def name(self) -> str: ...

    @property
    def is_lossless(self) -> bool:
        """Whether decoding returns the raw bytes. A lossy codec returns the same bytes every time."""

    @property
    def is_fixed_length(self) -> bool:
        """Whether all blocks of one raw length have payloads of the same length."""

    def encode(self, raw: memoryview) -> memoryview:
        """Return the payload, which is *raw* encoded.

        The payload may be a view of *raw*, so it is valid only as long as *raw* does not change.
        """

    def decode(self, payload: memoryview, out: memoryview) -> None:
        """Fill *out*, which has the raw length. Raises ValueError for bytes that this codec never wrote."""


class NoCodec:
    """The codec `none`: the payload is the raw bytes."""

    codec_id = 0
    name = "none"
    is_lossless = True
    is_fixed_length = True

    def encode(self, raw: memoryview) -> memoryview:
        return raw

    def decode(self, payload: memoryview, out: memoryview) -> None:
        if payload.nbytes != out.nbytes:
            raise ValueError(f"{payload.nbytes} bytes of payload for a block of {out.nbytes}")
        if payload is out:
            return  # the payload was read into *out* itself
        # Not out[:] = payload: a slice copy holds the GIL, so a payload whose pages are still on disk
        # would block every thread of the process for the time of the disk read.
        np.copyto(_bytes_of(out), _bytes_of(payload))


class ZstdPlaneCodec:
    """zstd level 1 on the most significant byte of each little-endian element; the other bytes stay raw.

    The most significant byte holds sign and exponent, which repeat across floats. Real K/V in bfloat16 shrinks 1.45
    times, in float16 1.16 times. Compressing the other bytes too, or at a higher level, gains nothing. The codec buys
    capacity, not speed: one core encodes about 0.5 GB/s and decodes 0.9 GB/s. Payload: the raw bytes of all elements,
    then one zstd frame.
    """

    is_lossless = True
    is_fixed_length = False

    def __init__(self, element_bytes: int) -> None:
        if element_bytes not in (1, 2, 4):
            raise ValueError(f"zstd-plane: element_bytes is {element_bytes}; use 1, 2 or 4")
        self.codec_id = 16 + element_bytes
        self.name = f"zstd-plane-{element_bytes}"
        self._element_bytes = element_bytes

    def encode(self, raw: memoryview) -> memoryview:
        elements = self._elements_of(raw)
        # A compressor is not thread-safe; a new one per call costs 1 % of the time for a block of 1 MiB.
        frame = zstandard.ZstdCompressor(level=1).compress(np.ascontiguousarray(elements[:, -1]).data)
        low = elements[:, :-1]
        payload = np.empty(low.size + len(frame), dtype=np.uint8)
        payload[: low.size].reshape(low.shape)[:] = low
        payload[low.size :] = np.frombuffer(frame, dtype=np.uint8)
        return payload.data

    def decode(self, payload: memoryview, out: memoryview) -> None:
        elements = self._elements_of(out)
        low = elements[:, :-1]
        stored = _bytes_of(payload)
        elements[:, -1] = _decompress(payload[low.size :], elements.shape[0])
        low[:] = stored[: low.size].reshape(low.shape)

    def _elements_of(self, raw: memoryview) -> npt.NDArray[np.uint8]:
        """Return *raw* as [num_elements, element_bytes], without copying."""
        if raw.nbytes % self._element_bytes:
            raise ValueError(f"{self.name}: a block of {raw.nbytes} bytes is not a whole number of elements")
        return _bytes_of(raw).reshape(-1, self._element_bytes)


def _bytes_of(view: memoryview) -> npt.NDArray[np.uint8]:
    return np.frombuffer(view, dtype=np.uint8)


def _decompress(frame: memoryview, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return the *num_bytes* that are compressed in *frame*.

    The size that the frame's header states is checked first, because a damaged header may state terabytes.
    """
    try:
        if zstandard.frame_content_size(frame) != num_bytes:
            raise ValueError(f"zstd frame does not state a size of {num_bytes} bytes")
        plane = zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(plane) != num_bytes:
        raise ValueError(f"zstd frame gave {len(plane)} of {num_bytes} bytes")
    return np.frombuffer(plane, dtype=np.uint8)


NO_CODEC = NoCodec()
_KNOWN: tuple[Codec, ...] = (
    NO_CODEC,
    ZstdPlaneCodec(1),
    ZstdPlaneCodec(2),
    ZstdPlaneCodec(4),
    Fp8Codec("bf16"),
    Fp8Codec("fp16"),
    Fp8Codec("fp32"),
)
CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in _KNOWN})
CODEC_BY_ID: Mapping[int, Codec] = MappingProxyType({codec.codec_id: codec for codec in _KNOWN})
