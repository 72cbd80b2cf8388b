"""RememberedBlocks: which blocks are remembered, and for how long."""

import hashlib

from kvtier.tiers.lower.remembered_blocks import WAYS, RememberedBlocks
from kvtier.tiers.naming.block_hash import BlockName


def names_of(text: str, start: int, end: int) -> list[BlockName]:
    """The chained names of blocks *start* to *end* of a document that is called *text*."""
    return [BlockName(hashlib.sha256(f"{text} {i}".encode()).digest()) for i in range(start, end)]


def test_a_refused_block_is_remembered() -> None:
    refused = RememberedBlocks(100)
    refused.remember(0, names_of("a", 0, 10))

    assert refused.has(0, names_of("a", 0, 20)) == [True] * 10 + [False] * 10


def test_groups_with_equal_names_are_told_apart() -> None:
    refused = RememberedBlocks(100)
    refused.remember(1, names_of("a", 0, 10))

    assert refused.has(0, names_of("a", 0, 10)) == [False] * 10
    assert refused.has(1, names_of("a", 0, 10)) == [True] * 10


def test_the_newest_are_remembered_and_the_oldest_forgotten() -> None:
    refused = RememberedBlocks(1600)
    for start in range(0, 10_000, 50):
        refused.remember(0, names_of("a", start, start + 50))
        refused.check()

    known = refused.has(0, names_of("a", 0, 10_000))

    assert sum(known) == 1600
    assert all(known[-400:])  # some longer than others, by how many came to their rows
    assert not any(known[:-4800])


def test_the_smallest_memory_remembers_one_row() -> None:
    refused = RememberedBlocks(0)
    refused.remember(0, names_of("a", 0, 100))
    refused.check()

    assert refused.has(0, names_of("a", 0, 100)) == [False] * (100 - WAYS) + [True] * WAYS
