"""PromptFingerprint: digests of a prompt for comparison with other prompts, from which no token can be recovered."""

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
_ROW = 512  # tokens per inner loop of numpy's multiplication; with 16 it takes 1.5 times as long


@dataclass(frozen=True)
class PromptFingerprint:
    """A representation of a prompt by digests and hashes, which depend on a secret key.

    *marks* has for each token 16 bits of a hash of the token and its position in the block. Two different tokens at the
    same position have the same mark with a probability of at most 1 in 32,768.
    """

    contents: Mapping[int, bytes]  # digests of the tokens of the first 1, 2, 4, ... and of all full blocks
    salt: bytes  # digest of the cache_salt; empty without one
    adapter: str
    namespace: bytes  # digest of the namespace's name
    block_names: Sequence[BlockName]  # of all full blocks
    first_keys: Sequence[bytes]  # parent and extra keys of the first blocks; later blocks have no extra keys
    marks: npt.NDArray[np.uint16]  # [blocks, block_size]
    num_tokens: int

    @property
    def block_size(self) -> int:
        """Number of tokens per block."""
        return int(self.marks.shape[1])

    @cached_property
    def names(self) -> npt.NDArray[np.uint64]:
        """64-bit hash of the name and namespace of each full block, [full blocks]."""
        return _words(self.block_names) ^ np.frombuffer(self.namespace, np.uint64)

    @cached_property
    def parents(self) -> npt.NDArray[np.uint64]:
        """64-bit hash of the previous block's name, the extra keys and the namespace, for each block, [blocks]."""
        keys = _words(self.first_keys) ^ np.frombuffer(self.namespace, np.uint64)
        return np.concatenate([keys, self.names[len(keys) - 1 : len(self.marks) - 1]])

    def length(self, block_id: int) -> int:
        """Return the number of the prompt's tokens in the block; the last block may have fewer."""
        return min(self.block_size, self.num_tokens - block_id * self.block_size)


class PromptPrinter:
    """A factory of prompt fingerprints. Only fingerprints with the same block size and key can be compared.

    The engine's thread makes a fingerprint of each finished request, so the hashes must be fast. Beginnings of the
    prompt are hashed with xxh3, because a keyed blake2b takes 0.55 ms for 131,072 tokens. Each token is hashed by a
    multiplication, because a running hash over each block takes 3 ms. `bench/observability/remembering.py` measures
    the cost.
    """

    def __init__(self, block_size: int, key: bytes) -> None:
        """Create a factory of prompt fingerprints. *key* is the secret on which all their hashes depend."""
        self._block_size = block_size
        self._key = key
        self._seed = int.from_bytes(digest_of(b"contents", key), "little")
        # Multiply-shift (Dietzfelbinger et al., 1997) with an odd factor for each position in a block.
        factors = np.frombuffer(hashlib.shake_128(b"marks" + key).digest(4 * block_size), np.uint32) | np.uint32(1)
        self._factors = np.tile(factors, -(-_ROW // block_size))

    def fingerprint_of(
        self, chain: BlockChain, names: Sequence[BlockName], num_tokens: int, namespace: str
    ) -> PromptFingerprint:
        """Return the fingerprint of a prompt, the first *num_tokens* tokens of *chain*, in *namespace*.

        *names* are the names of the full blocks of these tokens. The fingerprint keeps a reference to *names*.
        """
        size, extra = self._block_size, chain.extra
        num_full, num_blocks = num_tokens // size, -(-num_tokens // size)
        named = chain.named_ids(0, num_full)
        tail = np.array(chain.token_ids[num_full * size : num_tokens], np.uint32)
        contents = self._contents(named)
        # An adapter is a key of every block, but after the first block the parent's name already includes it.
        own = extra if extra.lora is None else replace(extra, lora=None)
        num_keyed = min(num_blocks, max(1, -(-own.end // size)))
        return PromptFingerprint(
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
        """Return a mark for each token: 16 bits of a hash, by which two prompts are compared token by token.

        *named* has the tokens of full blocks, *tail* the remaining tokens. *named* is overwritten, because a new array
        would not be in the CPU's caches.
        """
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
    """Return a keyed digest, so that the data cannot be guessed without the *key*."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=key).digest()


def _words(names: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Return the first 64 bits of each name. All names have the same length."""
    return np.frombuffer(b"".join(names), np.uint64)[:: len(names[0]) // 8] if names else np.empty(0, np.uint64)
