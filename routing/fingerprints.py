"""`Fingerprints`: the router's own hash of prefixes, computed for a long prompt in less than a millisecond."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from secrets import randbits
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Fingerprint: TypeAlias = int  # 64 bits

_WORD = 1 << 64
_MAX_SIZES = 16  # block sizes for which powers are kept
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse: the golden ratio's bits, as in splitmix64
_INVERSE = pow(_BASE, -1, _WORD)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The prefixes of one prompt: *fingerprints[i]* covers its first *(i + 1) × step_tokens* tokens."""

    fingerprints: Sequence[Fingerprint]
    step_tokens: float


class Fingerprints:
    """The router's hash of prompt prefixes. A fingerprint is a polynomial of all tokens of a prefix, modulo 2^64.

    Replicas name blocks by slow chained hashes, and each replica may use a different hash. But they report the parent
    and the tokens of each block, so the router can compute names that are the same for all replicas. Fingerprints are
    extended block by block, but do not depend on the block size: equal prefixes have equal fingerprints.

    Different prefixes may have the same fingerprint by chance, or because an attacker knows *key*. The router may then
    choose a worse replica, but the answer stays correct, because the replica itself looks up which blocks it reads.
    """

    def __init__(self, key: int | None = None) -> None:
        """Use the 64-bit secret *key*, which is random by default. No other process needs to know it."""
        self._key = randbits(64) if key is None else key
        self._powers: dict[int, _Powers] = {}  # by size of blocks

    def root(self, *what: str | None) -> Fingerprint:
        """Return the fingerprint of the empty prefix for prompts with these properties, such as adapter and salt."""
        parts = b"".join(b"-" if each is None else b"%d:%b" % (len(raw := _utf8(each)), raw) for each in what)
        digest = blake2b(parts, digest_size=8, key=self._key.to_bytes(8, "big")).digest()
        return int.from_bytes(digest, "big")

    def chain(self, before: Fingerprint, tokens: NDArray[np.unsignedinteger], block_size: int) -> list[Fingerprint]:
        """Return the fingerprint at the end of each full block of *tokens*.

        *before* is the fingerprint of the prefix before *tokens*.
        """
        prefixes: list[int] = self.chain_array(before, tokens, block_size).tolist()
        return prefixes

    def chain_array(
        self, before: Fingerprint, tokens: NDArray[np.unsignedinteger], block_size: int
    ) -> NDArray[np.uint64]:
        """Return the fingerprints after each full block of *tokens*. *before* is the fingerprint before the first."""
        num_blocks = len(tokens) // block_size
        powers = self._powers.pop(block_size, None) or _Powers(block_size)
        self._powers[block_size] = powers  # the most recently used is last
        if len(self._powers) > _MAX_SIZES:
            del self._powers[next(iter(self._powers))]
        up, down = powers.of(num_blocks)
        mixed = _mixed(tokens[: num_blocks * block_size].astype(np.uint64), self._key)
        blocks = (mixed.reshape(num_blocks, block_size) * powers.in_block).sum(axis=1, dtype=np.uint64)
        # Each fingerprint is the previous one × BASE^block_size + its block. Divided by the powers, this is a sum.
        return (np.cumsum(blocks * down, dtype=np.uint64) + np.uint64(before)) * up

    def beside(self, fingerprint: Fingerprint, keys: object) -> Fingerprint:
        """Return the fingerprint of the same tokens with additional *keys*, such as the images in them."""
        return fingerprint ^ self.root(repr(keys))


class _Powers:
    """A cache of the powers of `_BASE` for computing the fingerprints of prompts with blocks of one size."""

    def __init__(self, block_size: int) -> None:
        self._step = np.uint64(pow(_BASE, block_size, _WORD))
        self._back = np.uint64(pow(_INVERSE, block_size, _WORD))
        factors = np.full(block_size, _BASE, dtype=np.uint64)
        factors[0] = 1
        self.in_block = np.cumprod(factors, dtype=np.uint64)[::-1].copy()
        self._up = self._down = np.empty(0, dtype=np.uint64)

    def of(self, num_blocks: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return `_BASE` ** (i * block_size) for i = 1 to *num_blocks*, and the inverses of these powers."""
        if num_blocks > len(self._up):
            room = max(256, 2 * num_blocks)
            self._up = np.cumprod(np.full(room, self._step), dtype=np.uint64)
            self._down = np.cumprod(np.full(room, self._back), dtype=np.uint64)
        return self._up[:num_blocks], self._down[:num_blocks]


def _mixed(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Mix *values* in place with the last steps of splitmix64, so that each bit depends on all bits."""
    values += np.uint64(key)
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
