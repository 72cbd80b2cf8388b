"""TokenKeys: the names of the chunks that a key stands for, without reading its tokens twice."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvtier.engine.sidecar.lmcache.wire import Refused
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, ExtraKeys
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tenant import tenant_of

MOST_BYTES = 256 << 20  # kept of all requests: over a hundred of 131,072 tokens
_OVERHEAD = 4096  # of a request, beside what grows with its tokens
_WIDTHS = {0xDC: 3, 0xDD: 5}  # bytes of an array's header by its first byte; others have one

decode_ids = msgspec.msgpack.Decoder(list[int]).decode


@dataclass(eq=False, slots=True)
class Named:
    """What is known of one request's tokens: as they came, as numbers, and the names of the full chunks."""

    salt: str
    chain: BlockChain
    encoded: bytes = b""  # the tokens of the longest message, without the array's header
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))

    @property
    def num_bytes(self) -> int:
        """About what it takes: the tokens encoded, and twice as numbers (the chain keeps those it has named)."""
        return _OVERHEAD + len(self.encoded) + 8 * len(self.token_ids) + 100 * len(self.chain.names)


class TokenKeys:
    """Every message of a request carries all its tokens. They are decoded and hashed once: where a message begins with
    the bytes of the last one it has the same tokens, since msgpack's encoding of a number tells its own end.

    Kept until the request is forgotten, or, beyond `MOST_BYTES`, the one that was used least lately. Owned by the
    door's thread. A key of 131,072 tokens: 9 ms the first time, 7.5 of them msgpack's, 1.0 repeated, of which msgpack
    takes 0.95 to find the end of the array.
    """

    def __init__(self, chunk_tokens: int, most_bytes: int = MOST_BYTES) -> None:
        self._chunk_tokens = chunk_tokens
        self._most_bytes = most_bytes
        self._requests: OrderedDict[str, Named] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes kept, about."""
        return self._num_bytes

    def names(self, request_id: str, salt: str, token_ids: msgspec.Raw) -> Sequence[BlockName]:
        """The names of all full chunks of the tokens. `Refused` for what are no token ids."""
        encoded, num_tokens = _body(token_ids)
        named = self._take(request_id)
        if named is None or named.salt != salt or not _is_one_a_prefix(named.encoded, encoded):
            named = Named(salt, _chain(self._chunk_tokens, salt))
        if len(encoded) > len(named.encoded):
            _grow(named, encoded, num_tokens)
        self._requests[request_id] = named
        self._num_bytes += named.num_bytes
        while self._num_bytes > self._most_bytes and self._requests:
            self._take(next(iter(self._requests)))
        return named.chain.names[: num_tokens // self._chunk_tokens]

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._take(request_id)

    def check(self) -> None:
        """Raise AssertionError if the bytes are miscounted."""
        assert self._num_bytes == sum(named.num_bytes for named in self._requests.values()), "bytes are miscounted"

    def _take(self, request_id: str) -> Named | None:
        named = self._requests.pop(request_id, None)
        if named is not None:
            self._num_bytes -= named.num_bytes
        return named


def blocks_of_tokens(chunk_tokens: int, salt: str, token_ids: Sequence[int]) -> NamedBlocks:
    """The full chunks of these tokens, by the names that `TokenKeys` gives them. OverflowError for ids that are no
    numbers of 32 bits."""
    chain = _chain(chunk_tokens, salt)
    chain.extend(token_ids)
    return NamedBlocks(chain.names, [None, *chain.names[:-1]][: len(chain.names)], tenant_of(salt))


def _chain(chunk_tokens: int, salt: str) -> BlockChain:
    return BlockChain(chunk_tokens, ExtraKeys(cache_salt=salt or None))


def _is_one_a_prefix(one: bytes, other: bytes) -> bool:
    return one.startswith(other) or other.startswith(one)


def _grow(named: Named, encoded: bytes, num_tokens: int) -> None:
    """The tokens go on: decode and hash what is new."""
    num_new = num_tokens - len(named.token_ids)
    try:
        new = array("I", decode_ids(b"\xdd" + num_new.to_bytes(4, "big") + encoded[len(named.encoded) :]))
    except (msgspec.MsgspecError, OverflowError, RecursionError):
        raise Refused("token_ids", "token ids that are no numbers of 32 bits") from None
    named.token_ids += new
    named.chain.extend(named.token_ids)
    named.encoded = encoded


def _body(token_ids: msgspec.Raw) -> tuple[bytes, int]:
    """An array's elements as they came, and how many. (bytes: memoryviews are compared element by element.)"""
    data = memoryview(token_ids)
    first = data[0] if data else 0
    if first & 0xF0 == 0x90:
        return bytes(data[1:]), first & 0x0F
    width = _WIDTHS.get(first)
    if width is None:
        raise Refused("token_ids", "token ids that are no array")
    return bytes(data[width:]), int.from_bytes(data[1:width], "big")
