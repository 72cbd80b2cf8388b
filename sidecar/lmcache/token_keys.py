"""TokenKeys: the names of the chunks of a prompt, computed without decoding the same tokens twice."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from kvtier.sidecar.lmcache.token_encoding import Encoding, Tokens
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, ExtraKeys
from kvtier.tiers.naming.named_blocks import NamedBlocks, tenant_of

MAX_BYTES = 256 << 20  # kept for all requests: over a hundred requests of 131,072 tokens
MAX_OVER_BYTES = 32 << 20  # of these, for requests that have ended: twenty requests of 131,072 tokens
BEGINNING_BYTES = 1024  # of encoded tokens, by which a request finds an earlier request about the same document
_OVERHEAD = 4096  # bytes per request in addition to those that grow with its tokens

Beginning = tuple[Encoding, str, bytes]  # encoding, salt, and the first `BEGINNING_BYTES` of the encoded tokens


@dataclass(eq=False, slots=True)
class Named:
    """The tokens of one request received so far: their encoded bytes, their ids, and the names of their full chunks."""

    salt: str
    chain: BlockChain
    encoding: Encoding
    encoded: bytes = b""  # the tokens of the longest message
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))

    @property
    def num_bytes(self) -> int:
        """Approximate number of bytes of memory that this object takes."""
        # token ids count twice, because the chain keeps a copy
        return _OVERHEAD + len(self.encoded) + 8 * len(self.token_ids) + 100 * len(self.chain.names)

    @property
    def beginning(self) -> Beginning | None:
        """Key by which a later request with the same first tokens finds this one; None if there are too few tokens."""
        return _beginning(self.salt, self.encoding, self.encoded)

    def is_of(self, salt: str, tokens: Tokens) -> bool:
        """Return whether *tokens* and the tokens of this object are equal up to the end of the shorter of the two.

        Returns False if the salt or the encoding differs: bytes in different encodings cannot be compared.
        """
        if self.salt != salt or self.encoding is not tokens.encoding:
            return False
        return self.encoded.startswith(tokens.body) or tokens.body.startswith(self.encoded)

    def grow(self, tokens: Tokens) -> None:
        """Decode and hash the new part of *tokens*, which begin with the known ones. Raise `Refused` on invalid ids."""
        self.token_ids += tokens.after(len(self.encoded), len(self.token_ids))
        self.chain.extend(self.token_ids)
        self.encoded = tokens.body

    def shared_with(self, encoded: bytes) -> "Named":
        """Return the common beginning of these tokens and *encoded* (in the same encoding), cut to full chunks."""
        ends = self.encoding.chunk_ends(self.token_ids, len(self.encoded), self.chain.block_size)
        num_chunks = int(np.searchsorted(ends, _num_equal(self.encoded, encoded), "right"))
        num_tokens = num_chunks * self.chain.block_size
        end = int(ends[num_chunks - 1]) if num_chunks else 0
        chain = copy(self.chain)
        chain.cut(num_chunks)
        return Named(self.salt, chain, self.encoding, encoded[:end], self.token_ids[:num_tokens])


class TokenKeys:
    """A cache of the decoded and hashed tokens of requests. Owned by the endpoint's thread.

    Every message about a request carries all its tokens, but each token is decoded and hashed only once per request. If
    the tokens of a message begin with the bytes of the previous message, only the rest is decoded. Several requests
    often share a document. So a new request takes over the common tokens of the last request that had the same salt,
    encoding and first `BEGINNING_BYTES`.

    Of several requests with the same beginning, the last one is kept even after it has ended. Ended requests may take
    `MAX_OVER_BYTES`, and all requests `MAX_BYTES`. Beyond these limits, the least recently used request is dropped,
    ended requests first.

    A message of 131,072 tokens takes 9 ms if all of them are new. It takes 2 ms if an earlier request had the same
    tokens, and 1 ms if an earlier message of the same request had them.
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
        """Approximate number of bytes kept."""
        return self._num_bytes + self._num_over_bytes

    def names(self, request_id: str, salt: str, tokens: Tokens) -> Sequence[BlockName]:
        """Return the names of all full chunks of the tokens. Raise `Refused` for invalid token ids."""
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
        """Return the chunks and tokens of a request; None if they are not kept any more."""
        named = self._requests.get(request_id)
        return None if named is None else named.chain

    def forget(self, request_id: str) -> None:
        """Record that the request has ended."""
        named = self._requests.get(request_id)
        is_last = named is not None and named.beginning is not None and self._last.get(named.beginning) is named
        self._take(request_id)
        if named is not None and is_last:
            self._over[named] = None
            self._num_over_bytes += named.num_bytes
            self._index(named)
            while self._num_over_bytes > MAX_OVER_BYTES:
                self._drop_over()

    def drop_ended(self) -> None:
        """Drop what is kept for requests that have ended."""
        while self._over:
            self._drop_over()

    def check(self) -> None:
        """Raise AssertionError if bytes are miscounted, or if the index by first tokens does not match what is kept."""
        assert self._num_bytes == sum(named.num_bytes for named in self._requests.values()), "bytes are miscounted"
        assert self._num_over_bytes == sum(named.num_bytes for named in self._over), "bytes are miscounted"
        kept = {*self._requests.values(), *self._over}
        assert kept >= set(self._last.values()), "a request is found and not kept"
        assert set(self._last.values()) >= self._over.keys(), "a request is kept, and found by nothing"

    def _begun(self, salt: str, tokens: Tokens) -> Named:
        """Return the chunks that an earlier request has in common with *tokens*; empty if there is no such request."""
        beginning = _beginning(salt, tokens.encoding, tokens.body)
        like = None if beginning is None else self._last.get(beginning)
        if like is not None:
            if like in self._over:
                self._over.move_to_end(like)
            return like.shared_with(tokens.body)
        return Named(salt, BlockChain(self._chunk_tokens, ExtraKeys(cache_salt=salt or None)), tokens.encoding)

    def _index(self, named: Named) -> None:
        if named.beginning is not None:
            before = self._last.get(named.beginning)
            if before in self._over and before is not named:  # no new request would find the ended one any more
                self._drop_over(before)
            self._last[named.beginning] = named

    def _drop_over(self, named: Named | None = None) -> None:
        """Drop an ended request: *named*, or the least recently used one."""
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
        if named.beginning is not None and self._last.get(named.beginning) is named:
            del self._last[named.beginning]


def blocks_of_tokens(chunk_tokens: int, salt: str, token_ids: Sequence[int]) -> NamedBlocks:
    """Return the full chunks of these tokens, with the same names as from `TokenKeys`.

    Raises OverflowError for ids that are not numbers of 32 bits.
    """
    chain = BlockChain(chunk_tokens, ExtraKeys(cache_salt=salt or None))
    chain.extend(token_ids)
    return NamedBlocks(chain.names, [None, *chain.names[:-1]][: len(chain.names)], tenant_of(salt))


def _beginning(salt: str, encoding: Encoding, encoded: bytes) -> Beginning | None:
    return (encoding, salt, encoded[:BEGINNING_BYTES]) if len(encoded) >= BEGINNING_BYTES else None


def _num_equal(one: bytes, other: bytes) -> int:
    """Return the length of the common beginning of two byte strings."""
    num_bytes = min(len(one), len(other))
    differ = np.frombuffer(one, np.uint8, num_bytes) != np.frombuffer(other, np.uint8, num_bytes)
    first = int(differ.argmax()) if num_bytes else 0
    return first if num_bytes and differ[first] else num_bytes
