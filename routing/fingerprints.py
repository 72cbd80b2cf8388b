"""Fingerprints: the router's own names of prefixes, which it can take of a long prompt in less than a millisecond."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from secrets import randbits
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Fingerprint: TypeAlias = int  # 64 bits

_WORD = 1 << 64
_MAX_SIZES = 16  # of blocks for which powers are kept
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse: the golden ratio's bits, as in splitmix64
_INVERSE = pow(_BASE, -1, _WORD)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The prefixes of one prompt: *fingerprints[i]* is of its first *(i + 1) × step_tokens* tokens."""

    fingerprints: Sequence[Fingerprint]
    step_tokens: float


class Fingerprints:
    """Takes fingerprints: polynomials of all tokens of a prefix, modulo 2^64, of which one more block makes the next.

    Replicas name blocks by chains of slow hashes, each in a way of its own; what they tell of a block, its parent and
    its tokens, is enough for a name that is the same for all. Equal prefixes have equal fingerprints at any size of
    blocks. Two prefixes that share one by chance, or by somebody who knows *key*, cost a worse choice: it is the
    replica's own look-up that decides what is read.
    """

    def __init__(self, key: int | None = None) -> None:
        """*key*: 64 bits that others need not know; by default random ones."""
        self._key = randbits(64) if key is None else key
        self._powers: dict[int, _Powers] = {}  # by size of blocks

    def root(self, *what: str | None) -> Fingerprint:
        """That of no tokens: prefixes under other adapters or salts share none of theirs."""
        parts = b"".join(b"-" if each is None else b"%d:%b" % (len(raw := _utf8(each)), raw) for each in what)
        digest = blake2b(parts, digest_size=8, key=self._key.to_bytes(8, "big")).digest()
        return int.from_bytes(digest, "big")

    def chain(self, before: Fingerprint, tokens: NDArray[np.unsignedinteger], block_size: int) -> list[Fingerprint]:
        """Those of each full block of *tokens* that follows *before*."""
        prefixes: list[int] = self.chain_array(before, tokens, block_size).tolist()
        return prefixes

    def chain_array(
        self, before: Fingerprint, tokens: NDArray[np.unsignedinteger], block_size: int
    ) -> NDArray[np.uint64]:
        """The same, as an array."""
        num_blocks = len(tokens) // block_size
        powers = self._powers.pop(block_size, None) or _Powers(block_size)
        self._powers[block_size] = powers  # the newest is the last
        if len(self._powers) > _MAX_SIZES:
            del self._powers[next(iter(self._powers))]
        up, down = powers.of(num_blocks)
        mixed = _mixed(tokens[: num_blocks * block_size].astype(np.uint64), self._key)
        blocks = (mixed.reshape(num_blocks, block_size) * powers.in_block).sum(axis=1, dtype=np.uint64)
        # Each is the one before × BASE^block_size + its block: a sum, once all are divided by the powers.
        return (np.cumsum(blocks * down, dtype=np.uint64) + np.uint64(before)) * up

    def beside(self, fingerprint: Fingerprint, keys: object) -> Fingerprint:
        """That of the same tokens where something else decides too, such as the images in them."""
        return fingerprint ^ self.root(repr(keys))


class _Powers:
    """Powers of the base for one size of blocks, as many as were asked for."""

    def __init__(self, block_size: int) -> None:
        self._step = np.uint64(pow(_BASE, block_size, _WORD))
        self._back = np.uint64(pow(_INVERSE, block_size, _WORD))
        factors = np.full(block_size, _BASE, dtype=np.uint64)
        factors[0] = 1
        self.in_block = np.cumprod(factors, dtype=np.uint64)[::-1].copy()
        self._up = self._down = np.empty(0, dtype=np.uint64)

    def of(self, num_blocks: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """The base to the power of each number of blocks from 1 to *num_blocks*, and what undoes each."""
        if num_blocks > len(self._up):
            room = max(256, 2 * num_blocks)
            self._up = np.cumprod(np.full(room, self._step), dtype=np.uint64)
            self._down = np.cumprod(np.full(room, self._back), dtype=np.uint64)
        return self._up[:num_blocks], self._down[:num_blocks]


def _mixed(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Values of which each bit depends on each of theirs, as the last steps of splitmix64 make them; in place."""
    values += np.uint64(key)
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
