"""Tokens: the token ids of a request as received, in one of the two encodings that LMCache's clients use."""

from array import array
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.sidecar.lmcache.wire import Key, Refused

_HEADER_BYTES = {0xDC: 3, 0xDD: 5}  # of a msgpack array, by its first byte; a short array has one header byte
_WORD_BYTES = 4  # of a packed token id

decode_ids = msgspec.msgpack.Decoder(list[int]).decode


class Encoding(Protocol):
    """A way to write token ids as bytes.

    Two requests in the same encoding can be compared without decoding: if the bytes of one begin with the bytes of the
    other, so do the ids. Bytes in different encodings must not be compared, because the same bytes may mean different
    ids.
    """

    def decode(self, body: bytes, num_tokens: int) -> "array[int]":
        """Return the *num_tokens* ids in *body*. Raise `Refused` unless all of them are unsigned 32-bit numbers."""

    def chunk_ends(self, token_ids: "array[int]", num_bytes: int, chunk_tokens: int) -> npt.NDArray[np.int64]:
        """Return the byte offset at which each full chunk of *token_ids* ends when they are encoded.

        *num_bytes* is the number of all encoded bytes. Returns an empty array if the offsets are unknown.
        """


class ArrayEncoding:
    """Token ids as elements of a msgpack array, 1 to 5 bytes for each id (lmcache 0.5.5 and 0.5.6)."""

    def decode(self, body: bytes, num_tokens: int) -> "array[int]":
        try:
            return array("I", decode_ids(b"\xdd" + num_tokens.to_bytes(4, "big") + body))
        except (msgspec.MsgspecError, OverflowError, RecursionError):
            raise Refused("token_ids", "a request has token ids that are not unsigned 32-bit numbers") from None

    def chunk_ends(self, token_ids: "array[int]", num_bytes: int, chunk_tokens: int) -> npt.NDArray[np.int64]:
        ids = np.frombuffer(token_ids, np.uint32)
        widths = 1 + (ids >= 1 << 7).astype(np.int64) + (ids >= 1 << 8) + 2 * (ids >= 1 << 16)
        if widths.sum() != num_bytes:  # some id has more bytes than it needs
            return np.zeros(0, np.int64)
        return np.cumsum(widths[: len(ids) // chunk_tokens * chunk_tokens].reshape(-1, chunk_tokens).sum(1))


class PackedEncoding:
    """Token ids as big-endian 32-bit words (lmcache 0.5.7)."""

    def decode(self, body: bytes, num_tokens: int) -> "array[int]":
        return array("I", np.frombuffer(body, ">u4").astype(np.uint32).tobytes())

    def chunk_ends(self, token_ids: "array[int]", num_bytes: int, chunk_tokens: int) -> npt.NDArray[np.int64]:
        return np.arange(1, len(token_ids) // chunk_tokens + 1, dtype=np.int64) * (chunk_tokens * _WORD_BYTES)


ARRAY, PACKED = ArrayEncoding(), PackedEncoding()


@dataclass(frozen=True, slots=True)
class Tokens:
    """The encoded token ids of a request.

    *body* is `bytes`, not a memoryview, because memoryviews are compared element by element, which is slow.
    """

    encoding: Encoding
    body: bytes
    num: int

    def after(self, num_bytes: int, num_tokens: int) -> "array[int]":
        """Return the ids that follow the first *num_tokens* ids, which take the first *num_bytes* bytes."""
        return self.encoding.decode(self.body[num_bytes:], self.num - num_tokens)


def tokens_of(key: Key) -> Tokens:
    """Return the token ids of *key*, still encoded. Raise `Refused` if they are not an array."""
    if key.token_bytes is not None:
        return Tokens(PACKED, key.token_bytes, len(key.token_bytes) // _WORD_BYTES)
    data = memoryview(key.token_ids)
    first = data[0]
    if first & 0xF0 == 0x90:
        return Tokens(ARRAY, bytes(data[1:]), first & 0x0F)
    num_header_bytes = _HEADER_BYTES.get(first)
    if num_header_bytes is None:
        raise Refused("token_ids", "a request's token ids are not an array")
    return Tokens(ARRAY, bytes(data[num_header_bytes:]), int.from_bytes(data[1:num_header_bytes], "big"))
