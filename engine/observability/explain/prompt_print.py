"""PromptPrint: what is kept of a prompt to compare others with it. No token can be read from it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.tiers.naming.block_hash import BlockChain, BlockName

DIGEST_BYTES = 8
KEY_BYTES = 16
_ROW = 512  # tokens that numpy multiplies in one of its inner loops: 16 take half as long again


@dataclass(frozen=True)
class PromptPrint:
    """A prompt in digests and hashes, which a secret of this process goes into.

    A mark is 16 bits of a hash of a token and its place in the block: two tokens that differ have different marks in
    each place, but for one pair in 32,768 at most. What only a question needs is worked out when the first one comes.
    """

    contents: Mapping[int, bytes]  # digests of the tokens alone of the first 1, 2, 4, ... and of all full blocks
    salt: bytes  # digest of the cache_salt; empty without one
    adapter: str
    namespace: bytes  # digest of its name
    block_names: Sequence[BlockName]  # of all full blocks
    first_keys: Sequence[bytes]  # what each of the first blocks continues; the others have no extra keys of their own
    marks: npt.NDArray[np.uint16]  # [blocks, block_size]
    num_tokens: int

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return int(self.marks.shape[1])

    @cached_property
    def names(self) -> npt.NDArray[np.uint64]:
        """64 bits of name and namespace of each full block, [full blocks]."""
        return _words(self.block_names) ^ np.frombuffer(self.namespace, np.uint64)

    @cached_property
    def parents(self) -> npt.NDArray[np.uint64]:
        """64 bits of what each block continues, its extra keys among it, and of the namespace, [blocks]."""
        keys = _words(self.first_keys) ^ np.frombuffer(self.namespace, np.uint64)
        return np.concatenate([keys, self.names[len(keys) - 1 : len(self.marks) - 1]])

    def length(self, block_id: int) -> int:
        """Tokens of the prompt in the block: fewer in the last one."""
        return min(self.block_size, self.num_tokens - block_id * self.block_size)


class PromptPrinter:
    """Makes the prints of prompts in blocks of one size under one secret; prints of two secrets have nothing in common.

    Each request that ends is printed on the thread that computes, so the tokens go through hashes that take many at
    once: xxh3 for the contents, as a keyed blake2b takes 0.55 ms of 131,072 tokens, and a multiplication for the marks,
    as a hash that runs over each block takes 3 (`bench/observability/remembering.py` has what is left of that).
    """

    def __init__(self, block_size: int, key: bytes) -> None:
        """*key*: the secret."""
        self._block_size = block_size
        self._key = key
        self._seed = int.from_bytes(digest_of(b"contents", key), "little")
        # Multiply-shift (Dietzfelbinger et al., 1997) with an odd factor for each place in a block.
        factors = np.frombuffer(hashlib.shake_128(b"marks" + key).digest(4 * block_size), np.uint32) | np.uint32(1)
        self._factors = np.tile(factors, -(-_ROW // block_size))

    def print_of(self, chain: BlockChain, names: Sequence[BlockName], num_tokens: int, namespace: str) -> PromptPrint:
        """The print of the first *num_tokens* tokens of the chain; *names* are those of their full blocks, and are
        kept. In another *namespace* the same blocks have other names in it."""
        size, extra = self._block_size, chain.extra
        num_full, num_blocks = num_tokens // size, -(-num_tokens // size)
        named = chain.named_ids(0, num_full)
        tail = np.array(chain.token_ids[num_full * size : num_tokens], np.uint32)
        contents = self._contents(named)
        # An adapter is a key of every block; from the second one on it is in the name of the block before.
        own = extra if extra.lora is None else replace(extra, lora=None)
        num_keyed = min(num_blocks, max(1, -(-own.end // size)))
        return PromptPrint(
            contents,
            digest_of(extra.cache_salt.encode(), self._key) if extra.cache_salt else b"",
            "" if extra.lora is None else f"{extra.lora.name} {extra.lora.path}",
            digest_of(namespace.encode(), self._key),
            names,
            chain.continued_keys(0, num_keyed),
            self._marks(named, tail, num_blocks),
            num_tokens,
        )

    def _contents(self, named: npt.NDArray[np.uint32]) -> dict[int, bytes]:
        running, tokens, size = xxhash.xxh3_64(seed=self._seed), named.data, self._block_size
        found: dict[int, bytes] = {}
        start, end = 0, min(1, len(named) // size)
        while start < end:
            running.update(tokens[start * size : end * size])
            found[end] = running.digest()
            start, end = end, min(2 * end, len(named) // size)
        return found

    def _marks(
        self, named: npt.NDArray[np.uint32], tail: npt.NDArray[np.uint32], num_blocks: int
    ) -> npt.NDArray[np.uint16]:
        """The marks of all tokens. What is in *named* is lost: another array of its size would not be in the
        processor's caches."""
        width = len(self._factors)
        in_rows = len(named) // width * width
        rows, rest = named[:in_rows].reshape(-1, width), named[in_rows:]
        rows *= self._factors
        rest *= self._factors[: len(rest)]
        named >>= 16
        marks = np.zeros(num_blocks * self._block_size, np.uint16)
        marks[: len(named)] = named
        marks[len(named) : len(named) + len(tail)] = tail * self._factors[: len(tail)] >> 16
        return marks.reshape(num_blocks, self._block_size)


def digest_of(data: bytes, key: bytes) -> bytes:
    """A keyed digest: who does not have the *key* cannot try what the data was."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=key).digest()


def _words(names: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """The first 64 bits of each; all have one length."""
    return np.frombuffer(b"".join(names), np.uint64)[:: len(names[0]) // 8] if names else np.empty(0, np.uint64)
