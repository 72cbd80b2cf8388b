"""Blocks to put into a store and read back: their keys, their bytes, and the memory of these."""

import mmap
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

import numpy as np

from bench.rounds import KIB, MIB
from kvtier.store.blob_store import Blob, BlobStore
from kvtier.store.record import digest, digest_for_threads

BLOCK_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
BATCH_BYTES = 8 * MIB  # that a spill gives to a store in one call
REQUEST_BYTES = 16 * MIB  # one `read_many`
NAMESPACE = b"bench/store.py__"
_NUMBER_BYTES = 8
_SIZE_BYTES = 4  # in the place of the group in a tier's key


class Slots:
    """A memory file, every page touched: *source_bytes* of random bytes, then *out_bytes* to read into."""

    def __init__(self, source_bytes: int, out_bytes: int) -> None:
        self.source_bytes = source_bytes
        self.num_bytes = source_bytes + out_bytes
        self.fd = os.memfd_create("kvtier-bench", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.num_bytes)
        self._map = mmap.mmap(self.fd, self.num_bytes)
        flat = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(flat.ctypes.data)
        rng = np.random.default_rng(0)
        for start in range(0, self.num_bytes, 16 * MIB):
            part = flat[start : min(start + 16 * MIB, self.num_bytes)]
            part[:] = np.frombuffer(rng.bytes(part.size), dtype=np.uint8) if start < source_bytes else 0

    def source(self, start: int, num_bytes: int) -> memoryview:
        """*num_bytes* of the random bytes, from *start* on."""
        assert start + num_bytes <= self.source_bytes, f"{start + num_bytes} bytes of {self.source_bytes}"
        return memoryview(self._map)[start : start + num_bytes]

    def outs(self, block_bytes: int, num_blocks: int) -> list[memoryview]:
        """The first *num_blocks* slots to read into."""
        assert self.source_bytes + num_blocks * block_bytes <= self.num_bytes, "the slots are too few"
        view = memoryview(self._map)[self.source_bytes :]
        return [view[i * block_bytes : (i + 1) * block_bytes] for i in range(num_blocks)]


class Blocks:
    """Blocks by number and size. A key holds both, so it determines the bytes of its block."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.digest_of = cache(self._digest_of)

    def key(self, number: int, block_bytes: int) -> bytes:
        """A key as long as a tier's: namespace, a hash that ends with the number, and the size."""
        number_bytes = number.to_bytes(_NUMBER_BYTES, "big")
        name = sha256(number_bytes).digest()[:-_NUMBER_BYTES] + number_bytes
        return NAMESPACE + name + block_bytes.to_bytes(_SIZE_BYTES, "big")

    def raw(self, key: bytes) -> memoryview:
        """The bytes of the block *key*, in the slots."""
        block_bytes = self.num_bytes(key)
        return self._slots.source(self.number(key) * block_bytes % self._slots.source_bytes, block_bytes)

    def number(self, key: bytes) -> int:
        """The number of the block *key*."""
        return int.from_bytes(key[-_NUMBER_BYTES - _SIZE_BYTES : -_SIZE_BYTES], "big")

    def num_bytes(self, key: bytes) -> int:
        """The size of the block *key* in bytes."""
        return int.from_bytes(key[-_SIZE_BYTES:], "big")

    def _digest_of(self, key: bytes) -> bytes:
        return digest(self.raw(key))


@dataclass(frozen=True)
class Batch:
    """New blocks of a prompt, its last one first: each continues the next one of the list."""

    keys: list[bytes]
    raws: list[memoryview]

    def blobs(self, num_threads: int = 1) -> list[Blob]:
        """Return the blobs to put, with their digests. *num_threads* threads compute digests at the same time."""
        digest = digest_for_threads(num_threads)
        parents = [*self.keys[1:], b""]
        named = zip(self.keys, self.raws, parents, strict=True)
        return [Blob(key, digest(raw), raw, parent) for key, raw, parent in named]

    def put(self, store: BlobStore, num_threads: int = 1) -> None:
        """Compute the digests, and put the blocks into *store*. *num_threads* threads do this at the same time."""
        store.put_many(self.blobs(num_threads))


class NewBlocks:
    """Makes batches of new blocks, of one size or a mix with as many bytes of each size."""

    def __init__(self, blocks: Blocks, sizes: Sequence[int]) -> None:
        self._blocks = blocks
        self._sizes = sizes
        self._rng = random.Random(0)
        self._weights = [1 / size for size in sizes]
        self._number = 0

    def batch(self, num_bytes: int = BATCH_BYTES) -> Batch:
        """A batch of about *num_bytes*; of exactly that many if there is one size that divides it."""
        keys: list[bytes] = []
        left = num_bytes
        while left >= min(self._sizes):
            size = self._rng.choices(self._sizes, self._weights)[0]
            keys.append(self._blocks.key(self._number, size))
            self._number += 1
            left -= size
        keys.reverse()  # the tail of a prompt goes first
        return Batch(keys, [self._blocks.raw(key) for key in keys])
