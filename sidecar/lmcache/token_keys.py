"""TokenKeys: the names of the chunks that a key stands for, without reading its tokens twice."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from kvtier.sidecar.lmcache.token_encoding import Encoding, Tokens
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, ExtraKeys
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tenant import tenant_of

MAX_BYTES = 256 << 20  # kept of all requests: over a hundred of 131,072 tokens
MAX_OVER_BYTES = 32 << 20  # of that of requests that are over: twenty of 131,072 tokens
BEGINNING_BYTES = 1024  # of encoded tokens, by which a request finds an earlier one of the same document
_OVERHEAD = 4096  # of a request, beside what grows with its tokens

Beginning = tuple[Encoding, str, bytes]  # with the salt, and the first `BEGINNING_BYTES` of the encoded tokens


@dataclass(eq=False, slots=True)
class Named:
    """What is known of one request's tokens: as they came, as numbers, and the names of the full chunks."""

    salt: str
    chain: BlockChain
    encoding: Encoding
    encoded: bytes = b""  # the tokens of the longest message
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))

    @property
    def num_bytes(self) -> int:
        """About what it takes: the tokens encoded, and twice as numbers (the chain keeps those it has named)."""
        return _OVERHEAD + len(self.encoded) + 8 * len(self.token_ids) + 100 * len(self.chain.names)

    @property
    def beginning(self) -> Beginning | None:
        """What requests of the same document have in common, None for a short one."""
        return _beginning(self.salt, self.encoding, self.encoded)

    def is_of(self, salt: str, tokens: Tokens) -> bool:
        """Whether one of both sequences of tokens begins with the other. Only bytes of one encoding are compared: the
        bytes of one sequence can be those of another in the other encoding."""
        if self.salt != salt or self.encoding is not tokens.encoding:
            return False
        return self.encoded.startswith(tokens.body) or tokens.body.startswith(self.encoded)

    def grow(self, tokens: Tokens) -> None:
        """Decode and hash what *tokens* has beyond what is known. Raise `Refused` for what are no token ids."""
        self.token_ids += tokens.after(len(self.encoded), len(self.token_ids))
        self.chain.extend(self.token_ids)
        self.encoded = tokens.body

    def shared_with(self, encoded: bytes) -> "Named":
        """The full chunks with which both begin, which are in the same encoding."""
        ends = self.encoding.chunk_ends(self.token_ids, len(self.encoded), self.chain.block_size)
        num_chunks = int(np.searchsorted(ends, _num_equal(self.encoded, encoded), "right"))
        num_tokens = num_chunks * self.chain.block_size
        end = int(ends[num_chunks - 1]) if num_chunks else 0
        chain = copy(self.chain)
        chain.cut(num_chunks)
        return Named(self.salt, chain, self.encoding, encoded[:end], self.token_ids[:num_tokens])


class TokenKeys:
    """Every message of a request carries all its tokens. They are decoded and hashed once: where a message begins with
    the bytes of the last one, in the same encoding, it has the same tokens. Of a request that is new, so is what it has
    in common with the last one of the same salt and encoding that began with the same `BEGINNING_BYTES`: many questions
    are asked about one document.

    The last one of each beginning is kept also when it is over, up to `MAX_OVER_BYTES`; beyond that, and beyond
    `MAX_BYTES`, the one goes that was used least lately. Owned by the endpoint's thread. A key of 131,072 tokens: 9 ms the
    first time, 7.5 of them msgpack's, 2 in another request, 1.0 repeated in the same, of which msgpack takes 0.95 to
    find the end of the array.
    """

    def __init__(self, chunk_tokens: int, max_bytes: int = MAX_BYTES) -> None:
        self._chunk_tokens = chunk_tokens
        self._max_bytes = max_bytes
        self._requests: OrderedDict[str, Named] = OrderedDict()
        self._over: OrderedDict[Named, None] = OrderedDict()
        self._last: dict[Beginning, Named] = {}  # by beginning
        self._num_bytes = 0
        self._num_over_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes kept, about."""
        return self._num_bytes + self._num_over_bytes

    def names(self, request_id: str, salt: str, tokens: Tokens) -> Sequence[BlockName]:
        """Return the names of all full chunks of the tokens. Raise `Refused` for what are no token ids."""
        named = self._take(request_id)
        if named is None or not named.is_of(salt, tokens):
            named = self._begun(salt, tokens)
        if len(tokens.body) > len(named.encoded):
            named.grow(tokens)
        self._requests[request_id] = named
        self._num_bytes += named.num_bytes
        self._index(named)
        while self.num_bytes > self._max_bytes and (self._over or self._requests):
            self._drop_over() if self._over else self._take(next(iter(self._requests)))
        return named.chain.names[: tokens.num // self._chunk_tokens]

    def chain_of(self, request_id: str) -> BlockChain | None:
        """The chunks and tokens of a request; None if they are not kept any more."""
        named = self._requests.get(request_id)
        return None if named is None else named.chain

    def forget(self, request_id: str) -> None:
        """The request is over."""
        named = self._requests.get(request_id)
        is_last = named is not None and named.beginning is not None and self._last.get(named.beginning) is named
        self._take(request_id)
        if named is not None and is_last:
            self._over[named] = None
            self._num_over_bytes += named.num_bytes
            self._index(named)
            while self._num_over_bytes > MAX_OVER_BYTES:
                self._drop_over()

    def forget_over(self) -> None:
        """Keep nothing of requests that are over."""
        while self._over:
            self._drop_over()

    def check(self) -> None:
        """Raise AssertionError if the bytes are miscounted, or what is found by its beginning is not what is kept."""
        assert self._num_bytes == sum(named.num_bytes for named in self._requests.values()), "bytes are miscounted"
        assert self._num_over_bytes == sum(named.num_bytes for named in self._over), "bytes are miscounted"
        kept = {*self._requests.values(), *self._over}
        assert kept >= set(self._last.values()), "a request is found and not kept"
        assert set(self._last.values()) >= self._over.keys(), "a request is kept, and found by nothing"

    def _begun(self, salt: str, tokens: Tokens) -> Named:
        """What is known already of these tokens."""
        beginning = _beginning(salt, tokens.encoding, tokens.body)
        like = None if beginning is None else self._last.get(beginning)
        if like is not None:
            if like in self._over:
                self._over.move_to_end(like)
            return like.shared_with(tokens.body)
        return Named(salt, BlockChain(self._chunk_tokens, ExtraKeys(cache_salt=salt or None)), tokens.encoding)

    def _index(self, named: Named) -> None:
        """It is found by its beginning from now on, in place of another."""
        if named.beginning is not None:
            before = self._last.get(named.beginning)
            if before in self._over and before is not named:
                self._drop_over(before)
            self._last[named.beginning] = named

    def _drop_over(self, named: Named | None = None) -> None:
        """Without *named* the one that was over first."""
        named = next(iter(self._over)) if named is None else named
        del self._over[named]
        self._num_over_bytes -= named.num_bytes
        self._unindex(named)

    def _take(self, request_id: str) -> Named | None:
        named = self._requests.pop(request_id, None)
        if named is not None:
            self._num_bytes -= named.num_bytes
            self._unindex(named)
        return named

    def _unindex(self, named: Named) -> None:
        """It is not kept any more."""
        if named.beginning is not None and self._last.get(named.beginning) is named:
            del self._last[named.beginning]


def blocks_of_tokens(chunk_tokens: int, salt: str, token_ids: Sequence[int]) -> NamedBlocks:
    """The full chunks of these tokens, by the names that `TokenKeys` gives them. OverflowError for ids that are no
    numbers of 32 bits."""
    chain = BlockChain(chunk_tokens, ExtraKeys(cache_salt=salt or None))
    chain.extend(token_ids)
    return NamedBlocks(chain.names, [None, *chain.names[:-1]][: len(chain.names)], tenant_of(salt))


def _beginning(salt: str, encoding: Encoding, encoded: bytes) -> Beginning | None:
    return (encoding, salt, encoded[:BEGINNING_BYTES]) if len(encoded) >= BEGINNING_BYTES else None


def _num_equal(one: bytes, other: bytes) -> int:
    """How many bytes both begin with."""
    num_bytes = min(len(one), len(other))
    differ = np.frombuffer(one, np.uint8, num_bytes) != np.frombuffer(other, np.uint8, num_bytes)
    first = int(differ.argmax()) if num_bytes else 0
    return first if num_bytes and differ[first] else num_bytes
