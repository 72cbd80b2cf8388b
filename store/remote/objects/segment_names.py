"""Names of segments: objects that each hold consecutive blocks of a chain (the blocks of one prompt, in order).

A client that has the keys of a chain can compute the names of its segments, because the keys alone determine where a
chain is cut:

- Each key has a *level*, given by its hash. Half of all keys have level 0, a quarter level 1, and so on.
- Cutting a chain after each key of level n or higher gives the *intervals* of level n, of 2**n blocks on average.
- A segment holds one whole interval. Its name consists of the interval's last key and a level.

A key determines all keys before it. So a name determines which keys are in the segment, whichever client writes it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from kvtier.store.record import NAMESPACE_BYTES
from kvtier.store.remote_store import RemoteRecord

TOP = 8  # intervals of the top level have 256 blocks on average: 32 MiB of blocks of 128 KiB
MAX_BYTES = 64 << 20  # of values in a segment, unless one alone has more; a longer interval is cut at a lower level


# If n blocks follow an interval in its run, the interval has at most this many times n blocks. Other prompts may have
# only the beginning of the run (a document) in common. They cannot use an interval that extends beyond the document,
# so intervals get shorter towards the end of the run.
_TIMES_WHAT_FOLLOWS = 4
_ALWAYS_ALLOWED = 8  # blocks that an interval may have in any case


class SegmentName(NamedTuple):
    """The name of a segment, an object that holds consecutive blocks of a prompt.

    *last* is the key of the segment's last block. *level* is 0 if there is no other block. Otherwise it is one more
    than the highest `level_of` of the other blocks' keys. So the keys of a segment determine its name.
    """

    level: int
    last: bytes

    @property
    def namespace(self) -> bytes:
        return self.last[:NAMESPACE_BYTES]

    @property
    def path(self) -> str:
        """Path of the object below the store's prefix: the namespace's folder, and a name made from the two fields."""
        return f"{folder_of(self.last)}/{self.level}-{hashlib.sha256(self.last).hexdigest()[:40]}"


class Segment(NamedTuple):
    """Records that are stored in one object, and the object's name."""

    name: SegmentName
    records: Sequence[RemoteRecord]


def folder_of(key: bytes) -> str:
    """Return the folder for the namespace of *key*. Instead of a key, the namespace alone may be passed."""
    return key[:NAMESPACE_BYTES].hex()


def level_of(key: bytes) -> int:
    """Return the level of a block's *key*, which determines where a prompt's blocks are cut into segments (objects).

    It is the number of zero bits at the end of the key's hash, at most `TOP`.
    """
    # The key is hashed here because a block's name need not be a hash.
    bits = xxhash.xxh3_64_intdigest(key) | 1 << TOP
    return (bits & -bits).bit_length() - 1


def cut(records: Sequence[RemoteRecord]) -> list[Segment]:
    """Cut *records* into segments: objects that each hold consecutive blocks of a prompt.

    A segment may end only where the levels of the keys allow it (see `level_of`), and is as long as its limits allow.
    """
    return [segment for run in _runs(records) for segment in _cut_run(run)]


def _runs(records: Sequence[RemoteRecord]) -> list[list[RemoteRecord]]:
    """Group *records* into runs. In a run, each record is the parent of the next record.

    In *records* the runs may be interleaved.
    """
    runs: list[list[RemoteRecord]] = []
    by_end: dict[bytes, list[RemoteRecord]] = {}
    for record in records:
        run = by_end.pop(record.parent, None) if record.parent else None
        if run is None:
            run = []
            runs.append(run)
        run.append(record)
        by_end[record.key] = run
    return runs


def _cut_run(run: Sequence[RemoteRecord]) -> Iterator[Segment]:
    levels = [level_of(record.key) for record in run]
    sizes = [len(record.header) + record.payload.nbytes for record in run]
    begun = level_of(run[0].parent) if run[0].parent else TOP  # intervals up to this level begin with the next block
    start = 0
    while start < len(run):
        end = _longest(levels, sizes, start, begun)
        inner = levels[start : end - 1]
        name = SegmentName(1 + max(inner) if inner else 0, run[end - 1].key)
        yield Segment(name, run[start:end])
        begun = levels[end - 1]
        start = end


def _longest(levels: Sequence[int], sizes: Sequence[int], start: int, begun: int) -> int:
    """Return the index after the last record of the longest segment that may begin with the record at *start*.

    *levels* has the level of each record's key (see `level_of`), and *sizes* each record's size in bytes. The segment
    ends at the latest with the first record of level *begun* or higher.
    """
    end = start + 1
    highest = levels[start]  # each end found is the first one of its level, so intervals up to that level end there
    num_bytes = sizes[start]
    for at in range(start + 1, len(levels)):
        num_bytes += sizes[at]
        if highest >= begun or num_bytes > MAX_BYTES:
            break
        if levels[at] > highest:
            if at + 1 - start > max(_TIMES_WHAT_FOLLOWS * (len(levels) - at - 1), _ALWAYS_ALLOWED):
                break
            highest, end = levels[at], at + 1
    return end
