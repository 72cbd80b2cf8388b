"""Names of segments, the objects that each hold a run of consecutive blocks of a chain.

A client that has the keys of a chain can compute the names of its segments, because the keys alone determine where a
chain is cut:

- Each key has a *level*, given by its hash. Half of all keys have level 0, a quarter level 1, and so on.
- An interval of a level is the blocks between two neighbouring keys that have at least this level. It includes the
  second key but not the first.
- A segment holds a whole interval. Its name consists of the interval's last key and a level.

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


_TIMES_WHAT_FOLLOWS = 4  # limit on the blocks of an interval, relative to those that follow it in its run
_ALWAYS_ALLOWED = 8  # blocks that an interval may have in any case


class SegmentName(NamedTuple):
    """The name of a segment: the last key of its interval, and the interval's level.

    The same blocks may be an interval of several levels. For example, if the keys before *last* have level 0, and
    *last* and the key before the interval have level 3, the blocks are an interval of the levels 1, 2 and 3. *level* is
    the lowest of these levels, so that each interval has only one name. It is one more than the highest level of the
    keys before *last*, or 0 if *last* is the only key.
    """

    level: int
    last: bytes

    @property
    def namespace(self) -> bytes:
        return self.last[:NAMESPACE_BYTES]

    @property
    def path(self) -> str:
        """The object's path below the store's prefix: the namespace's folder, and a name derived from level and key."""
        return f"{folder_of(self.last)}/{self.level}-{hashlib.sha256(self.last).hexdigest()[:40]}"


class Segment(NamedTuple):
    """Records that are stored in one object, and the object's name."""

    name: SegmentName
    records: Sequence[RemoteRecord]


def folder_of(key: bytes) -> str:
    """Return the folder for the namespace of *key*. Instead of a key, the namespace alone may be passed."""
    return key[:NAMESPACE_BYTES].hex()


def level_of(key: bytes) -> int:
    """Return the level of *key*: the number of zero bits at the end of the key's hash, at most `TOP`.

    The key is hashed here because a block's name need not be a hash.
    """
    bits = xxhash.xxh3_64_intdigest(key) | 1 << TOP
    return (bits & -bits).bit_length() - 1


def cut(records: Sequence[RemoteRecord]) -> list[Segment]:
    """Cut *records* into as few segments as possible, each a whole interval. A record without parent begins a chain."""
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
    """Cut *run* into segments. Each is the longest interval of at most `MAX_BYTES` that begins after the previous one.

    An interval has at most 8 blocks or, if that is more, at most four times as many blocks as follow it in the run.
    Other prompts may begin with the same document as this run and then continue differently. They cannot use an
    interval that extends beyond the document. The limit keeps this interval short if the run ends soon after the
    document.
    """
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
    """Return the end (exclusive) of the longest allowed interval that begins at index *start*.

    *begun* is the highest level that has an interval beginning at *start*. All lower levels have one too.
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
