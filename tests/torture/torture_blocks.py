"""Blocks that are determined by a number: their key, size and bytes, and the block that they continue."""

from pathlib import Path

import numpy as np

from kvtier.store.blob_store import Blob, BlobStore
from kvtier.store.codec.codec import CODECS
from kvtier.store.codec.seal import charged_bytes
from kvtier.store.durability import Durability
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.record import Fault, digest

NAMESPACE = b"model-T layout-1"
KINDS = ("equal", "whole pages", "small", "mixed")  # kinds of sizes; `number % 4` is the kind
CHAIN_BLOCKS = 8  # in a chain, each continuing the one before it
MAX_BYTES = 200_000
_PAGE_BYTES = 4096
_PAGE_HEADER_BYTES = 16
# bfloat16 noise: its high bytes compress, its low bytes do not.
_NOISE = (np.random.default_rng(1).standard_normal(1 << 19, dtype=np.float32).view(np.uint32) >> 16).astype("<u2")
_NOISE_BYTES = _NOISE.tobytes()


def open_store(folder: Path | str, capacity_bytes: int, codec: str, durability: str) -> LmdbStore:
    """Open the store under test, with its settings by name."""
    return LmdbStore(Path(folder), capacity_bytes, CODECS[codec], durability=Durability(durability))


def chain(kind: str, chain_id: int) -> list[int]:
    """The numbers of a chain's blocks, first block first."""
    first = chain_id * CHAIN_BLOCKS
    return [place * len(KINDS) + KINDS.index(kind) for place in range(first, first + CHAIN_BLOCKS)]


def parent_of(number: int) -> int | None:
    """The block that *number* continues; None for the first of its chain."""
    return number - len(KINDS) if number // len(KINDS) % CHAIN_BLOCKS else None


def num_bytes(number: int) -> int:
    """Bytes of the block *number*."""
    dice = _hash(number)
    match KINDS[number % len(KINDS)]:
        case "equal":
            return 20_000
        case "whole pages":  # fills its last page, or is one element too long for it
            return 4 * _PAGE_BYTES - _PAGE_HEADER_BYTES + 2 * (dice % 2)
        case "small":  # in leaf pages up to half a page, in pages of their own above that
            return 2 + dice % 3000 // 2 * 2
        case _:
            return (2 + dice % 5_000 if dice % 3 else 2 + dice // 8 % (MAX_BYTES - 2)) // 2 * 2


def raw_bytes(number: int) -> bytes:
    """The bytes of a block, stamped with its number once a page, so that no page fits into another block."""
    size = num_bytes(number)
    start = _hash(number + 1) % (len(_NOISE_BYTES) - MAX_BYTES) // 2 * 2
    raw = bytearray(_NOISE_BYTES[start : start + size])
    for offset in range(0, size - 8, _PAGE_BYTES):
        raw[offset : offset + 8] = number.to_bytes(8, "little")
    return bytes(raw)


def key_of(number: int) -> bytes:
    return NAMESPACE + number.to_bytes(32, "big")


def number_of(key: bytes) -> int:
    return int.from_bytes(key[len(NAMESPACE) :], "big")


def numbers_in(store: BlobStore) -> list[int]:
    """The blocks that *store* lists, in its order."""
    return [number_of(key) for key in list(store.keys())]


def blob_of(number: int) -> Blob:
    raw = raw_bytes(number)
    parent = parent_of(number)
    return Blob(key_of(number), digest(raw), memoryview(raw), b"" if parent is None else key_of(parent))


def max_charged(number: int) -> int:
    """Most bytes that the block counts against the capacity."""
    return charged_bytes(num_bytes(number))


def min_charged(number: int) -> int:
    """Least bytes that it counts, whichever codec wrote it."""
    return charged_bytes(num_bytes(number) // 2)


def read_numbers(store: BlobStore, numbers: list[int]) -> tuple[list[int], dict[int, Fault]]:
    """Read *numbers*: which came back right, and the faults of the others. AssertionError for wrong bytes."""
    outs = [bytearray(num_bytes(number)) for number in numbers]
    results = store.read_many([key_of(number) for number in numbers], [memoryview(out) for out in outs])
    good, faults = [], {}
    for number, out, result in zip(numbers, outs, results, strict=True):
        if isinstance(result, Fault):
            faults[number] = result
            continue
        raw = raw_bytes(number)
        assert out == raw, f"WRONG BYTES in block {number}"
        assert result == digest(raw), f"WRONG DIGEST for block {number}"
        good.append(number)
    return good, faults


def _hash(number: int) -> int:
    """Splitmix64: a number as good as random, and the same in every process."""
    mixed = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 31)
