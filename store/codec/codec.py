"""Codecs: the encodings in which the bytes of a block are stored."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from kvtier.store.codec.fp8_codec import Fp8Codec


class Codec(Protocol):
    """An encoding in which blocks are stored, for example a compression. It is stateless, so threads may share it."""

    @property
    def codec_id(self) -> int:
        """Number of the codec, which is stored in every record. It is never reused for another encoding."""

    @property
    def name(self) -> str: ...

    @property
    def is_lossless(self) -> bool:
        """True if decoding returns the raw bytes. A lossy codec returns other bytes, but the same ones every time."""

    @property
    def is_fixed_length(self) -> bool:
        """True if blocks of the same raw length always have payloads of the same length."""

    def encode(self, raw: memoryview) -> memoryview:
        """Return *raw* in encoded form, as the payload to store.

        The payload may be a view of *raw*. Then it is valid only as long as *raw* does not change.
        """

    def decode(self, payload: memoryview, out: memoryview) -> None:
        """Decode *payload* into *out*, which has the raw length.

        Raises ValueError for a payload that this codec never wrote.
        """


class NoCodec:
    """The codec `none`, which stores the raw bytes."""

    codec_id = 0
    name = "none"
    is_lossless = True
    is_fixed_length = True

    def encode(self, raw: memoryview) -> memoryview:
        return raw

    def decode(self, payload: memoryview, out: memoryview) -> None:
        if payload.nbytes != out.nbytes:
            raise ValueError(f"codec none: the payload has {payload.nbytes} bytes, but the block has {out.nbytes}")
        if payload is out:
            return  # the payload was read into *out* itself
        # Not out[:] = payload: a slice copy holds the GIL, so a payload whose pages are still on disk
        # would block every thread of the process for the time of the disk read.
        np.copyto(_bytes_of(out), _bytes_of(payload))


class ZstdPlaneCodec:
    """A lossless codec: zstd level 1 on the most significant byte of each little-endian element.

    The most significant byte holds sign and exponent, which repeat across floats. The other bytes stay raw: compressing
    them too, or at a higher level, gains nothing. Real K/V data in bfloat16 shrinks 1.45 times, in float16 1.16 times.
    The codec saves disk space rather than time: one core encodes about 0.5 GB/s and decodes 0.9 GB/s.

    The payload starts with the bytes that stay raw, followed by one zstd frame.
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
        """Return *raw* as an array [num_elements, element_bytes], without copying."""
        if raw.nbytes % self._element_bytes:
            raise ValueError(f"{self.name}: a block of {raw.nbytes} bytes is not a whole number of elements")
        return _bytes_of(raw).reshape(-1, self._element_bytes)


def _bytes_of(view: memoryview) -> npt.NDArray[np.uint8]:
    return np.frombuffer(view, dtype=np.uint8)


def _decompress(frame: memoryview, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return the *num_bytes* that are compressed in *frame*.

    The size in the frame's header is checked before decompressing, because a damaged header may state terabytes.
    """
    try:
        if zstandard.frame_content_size(frame) != num_bytes:
            raise ValueError(f"the header of the zstd frame does not state the expected size of {num_bytes} bytes")
        plane = zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(plane) != num_bytes:
        raise ValueError(f"the zstd frame has {len(plane)} decompressed bytes instead of {num_bytes}")
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
