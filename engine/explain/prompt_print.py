"""PromptPrint: what is kept of a prompt to compare others with it. No token can be read from it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.tiers.naming.block_hash import BlockChain

DIGEST_BYTES = 8
KEY_BYTES = 16
_ODD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0xD6E8FEB86659FD93))


@dataclass(frozen=True, slots=True)
class PromptPrint:
    """A prompt in digests and hashes, which a secret of this process goes into.

    A mark is 16 bits of a hash that runs over the tokens of a block: two blocks that continue one prefix agree in their
    marks up to the first token that differs, but for one time in 65,536.
    """

    contents: Mapping[int, bytes]  # digests of the tokens alone of the first 1, 2, 4, ... and of all full blocks
    salt: bytes  # digest of the cache_salt; empty without one
    adapter: str
    names: npt.NDArray[np.uint64]  # [full blocks] 64 bits of name and namespace
    parents: npt.NDArray[np.uint64]  # [blocks] 64 bits of what the block continues, its extra keys among it
    marks: npt.NDArray[np.uint16]  # [blocks, block_size]
    num_tokens: int

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return int(self.marks.shape[1])

    def length(self, block_id: int) -> int:
        """Tokens of the prompt in the block: fewer in the last one."""
        return min(self.block_size, self.num_tokens - block_id * self.block_size)


def print_of(chain: BlockChain, num_tokens: int, namespace: str, key: bytes) -> PromptPrint:
    """The print of the first *num_tokens* tokens of the chain, under the secret *key*. In another *namespace* the same
    blocks have other names in it."""
    size = chain.block_size
    num_full = num_tokens // size
    tail = np.asarray(chain.token_ids[num_full * size : num_tokens], np.uint64)
    ids = np.concatenate([chain.named_ids(0, num_full).astype(np.uint64), tail])
    num_blocks = -(-num_tokens // size)
    word = np.frombuffer(digest_of(namespace.encode(), key), np.uint64)
    return PromptPrint(
        _contents(ids[: num_full * size], size, key),
        digest_of(chain.extra.cache_salt.encode(), key) if chain.extra.cache_salt else b"",
        "" if chain.extra.lora is None else f"{chain.extra.lora.name} {chain.extra.lora.path}",
        _words(chain.names[:num_full]) ^ word,
        _words(chain.continued_keys(0, num_blocks)) ^ word,
        _marks(ids, num_blocks, size, key),
        num_tokens,
    )


def digest_of(data: bytes, key: bytes) -> bytes:
    """A keyed digest: who does not have the *key* cannot try what the data was."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=key).digest()


def _contents(ids: npt.NDArray[np.uint64], size: int, key: bytes) -> dict[int, bytes]:
    running = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key)
    found: dict[int, bytes] = {}
    start, end = 0, min(1, len(ids) // size)
    while start < end:
        running.update(ids[start * size : end * size].astype("<u4").tobytes())
        found[end] = running.copy().digest()
        start, end = end, min(2 * end, len(ids) // size)
    return found


def _words(names: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    return np.frombuffer(b"".join([name[:8] for name in names]), np.uint64)


def _marks(ids: npt.NDArray[np.uint64], num_blocks: int, size: int, key: bytes) -> npt.NDArray[np.uint16]:
    mixed = np.zeros(num_blocks * size, np.uint64)
    places = np.arange(len(ids), dtype=np.uint64) % np.uint64(size)
    own = ids * _ODD[0] + places * _ODD[1] + np.frombuffer(key[:8], np.uint64)
    own ^= own >> np.uint64(29)
    own *= _ODD[2]
    own ^= own >> np.uint64(32)
    mixed[: len(ids)] = own * _ODD[0]
    running = np.cumsum(mixed.reshape(num_blocks, size), axis=1, dtype=np.uint64)
    return (running >> np.uint64(48)).astype(np.uint16)
