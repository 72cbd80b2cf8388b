"""NameSet: a set for millions of block names. No call becomes slower as the set grows."""

from array import array
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.eviction_order import GrowingRows
from kvtier.tiers.naming.block_hash import BlockName

NAMESPACE_BYTES = 16
GROUP_BYTES = 4
NAME_BYTES = 32
KEY_BYTES = NAMESPACE_BYTES + NAME_BYTES + GROUP_BYTES
TAG_BYTES = 4  # size of a tag: a part of the name, which is compared before the whole name
WIDTH = 16  # places per bucket, so that a bucket's tags fill one cache line
BUCKET_BYTES = WIDTH * TAG_BYTES
USED_UP = (1 << WIDTH) - 1  # bitmap of a bucket without a free place
MEAN = 3.5  # average names per bucket; the buckets to be split next have up to twice as many
SPLIT_AT_ONCE = 32  # buckets to split at once when names are added one by one
SCAN_BUCKETS = 1 << 14  # buckets that one call of `find` scans: a megabyte of tags
LONG = 1024  # minimum number of names for which `holds` tries whether they were added one after another
STRIDE = 16  # it then looks up one name in this many, and compares the others with the rows next to the row found
MIN_SHARE = 4  # it compares only if at least 1/MIN_SHARE of the rows found are STRIDE rows from the one before
FREE = b"\xff" * NAME_BYTES  # content of a row without a name; no hash is equal to it

Rows = npt.NDArray[np.uint64]  # [names, 4]


def block_key(namespace: bytes, group_id: int, name: BlockName) -> bytes:
    """Return the store's key of a block: namespace (16 B) ‖ block name ‖ group id (4 B, big endian)."""
    return namespace + name + group_id.to_bytes(GROUP_BYTES, "big")


def rows_of(names: Sequence[BlockName]) -> Rows:
    """Return the names as an array of numbers, one row of four per name."""
    joined = b"".join(names)
    assert len(joined) == NAME_BYTES * len(names), f"a name has {NAME_BYTES} bytes"
    return np.frombuffer(joined, np.uint64).reshape(-1, NAME_BYTES // 8)


def names_of(rows: Rows) -> list[BlockName]:
    """Return the names in these rows: the inverse of `rows_of`."""
    return cast(list[BlockName], np.ascontiguousarray(rows).view(f"V{NAME_BYTES}").ravel().tolist())


class NameSet:
    """A set of block names in flat arrays, which take 70 bytes per name. Owned by one thread.

    The names are rows of one array, not Python objects, so the garbage collector does not visit them. A hash table with
    linear hashing (Litwin, 1980) finds a name's row: as names are added, its buckets are split one after another, never
    all at once. Each place in a bucket stores the number of a row and a *tag*, which is 31 bits of that row's name.
    Some bits of the tag choose the bucket. If a bucket is full, which happens to one name in some thousands, the name
    goes into a Python set.
    """

    def __init__(self) -> None:
        self._tags = GrowingRows(np.uint32, WIDTH)  # [bucket]; 0: the place is free
        self._places = GrowingRows(np.uint32, WIDTH)  # [bucket] row of each name
        self._used = GrowingRows(np.uint16, 1)  # [bucket] bitmap of the places in use
        self._is_over = GrowingRows(np.bool_, 1)  # [bucket] whether the Python set may have names of this bucket
        self._over: set[BlockName] = set()  # names whose bucket was full
        self._rows = GrowingRows(np.uint64, NAME_BYTES // 8)  # [row] name
        self._parts = (self._tags, self._places, self._used, self._is_over, self._rows)
        self._free = array("I")  # rows of discarded names
        self._num_rows = 0
        self._num_in_buckets = 0
        self._level = 1  # number of buckets when all had last been split equally often; a power of two
        self.num_buckets = 1  # current number of buckets; it grows as buckets are split
        self._next = 0  # bucket where `find` continues

    def __len__(self) -> int:
        return self._num_in_buckets + len(self._over)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory used by the set."""
        return sum(len(part.memory) for part in self._parts)

    @property
    def num_over(self) -> int:
        """Number of names that are in the Python set, because their bucket was full."""
        return len(self._over)

    def __contains__(self, name: BlockName) -> bool:
        return self._position(name) is not None or name in self._over

    def holds(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return for each name in *rows* (see `rows_of`) whether it is in the set."""
        if len(rows) < LONG:
            return self._are_found(rows)
        found = self._are_beside(rows)
        rest = np.flatnonzero(~found)
        if len(rest):
            found[rest] = self._are_found(rows.take(rest, axis=0))
        return found

    def add(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Add these names, and return for each whether it is new. Of equal names in *rows*, only one counts as new."""
        is_new = ~self.holds(rows)
        new = np.flatnonzero(is_new)
        while (missing := int((len(self) + len(new)) / MEAN) - self.num_buckets) > 0:
            self._split(min(missing, 2 * self._level - self.num_buckets))
        tags = _tags(rows).take(new)
        buckets = self._buckets(tags)
        order = np.argsort((buckets << 32) + tags)
        new, tags, buckets = new.take(order), tags.take(order), buckets.take(order)
        if len(twice := np.flatnonzero(tags[1:] == tags[:-1])):
            is_first = _first_ones(rows.take(new, axis=0), twice)
            is_new[new[~is_first]] = False
            new, tags, buckets = new[is_first], tags[is_first], buckets[is_first]
        places = self._take_rows(len(new))[np.argsort(np.argsort(new))]  # adjacent names get adjacent rows
        self._put(rows.take(new, axis=0), tags, buckets, places)
        return is_new

    def add_one(self, name: BlockName) -> bool:
        """Add one name, and return whether it is new. Takes 5 µs; `add` with one name would take 200 µs."""
        if name in self:
            return False
        if int(len(self) / MEAN) - self.num_buckets >= SPLIT_AT_ONCE:
            self._split(min(SPLIT_AT_ONCE, 2 * self._level - self.num_buckets))
        tag, bucket = self._tag_and_bucket(name)
        used = self._used.items[bucket]
        if used == USED_UP:
            self._is_over.items[bucket] = True
            self._over.add(name)
            return True
        lowest_free = ~used & (used + 1)
        self._used.items[bucket] = used | lowest_free
        position = bucket * WIDTH + lowest_free.bit_length() - 1
        if self._free:
            row = self._free.pop()
        else:
            row, self._num_rows = self._num_rows, self._num_rows + 1
            self._rows.grow(self._num_rows)
        self._rows.memory[row * NAME_BYTES : (row + 1) * NAME_BYTES] = name
        self._tags.items[position] = tag
        self._places.items[position] = row
        self._num_in_buckets += 1
        return True

    def discard(self, name: BlockName) -> bool:
        """Remove a name and return whether it was in the set."""
        position = self._position(name)
        if position is None:
            was_over = name in self._over
            self._over.discard(name)
            return was_over
        bucket, column = divmod(position, WIDTH)
        self._tags.items[position] = 0
        self._used.items[bucket] ^= 1 << column
        row = self._places.items[position]
        self._rows.memory[row * NAME_BYTES : (row + 1) * NAME_BYTES] = FREE
        self._free.append(row)
        self._num_in_buckets -= 1
        return True

    def find(self) -> list[BlockName]:
        """Return a few names of the set, different ones on each call. May return none although the set has some."""
        start, end = self._next, min(self._next + SCAN_BUCKETS, self.num_buckets)
        hits = np.flatnonzero(self._tags.all[start:end])[:WIDTH]
        self._next = 0 if end == self.num_buckets else end
        if len(hits):
            self._next = start + (int(hits[-1]) >> 4) + 1
            self._next %= self.num_buckets
        found = names_of(self._rows.all[self._places.all[start:end].reshape(-1)[hits]])
        return found + (list(self._over)[:WIDTH] if start == 0 else [])

    def pages(self, num_buckets: int) -> Iterator[list[BlockName]]:
        """Yield the names of the set in pages of *num_buckets* buckets each.

        Names may be added and removed between two pages. A page has only names that are in the set at that time. A name
        that stays in the set during the whole iteration is yielded. A name that is added meanwhile may be yielded twice
        or not at all. The iteration ends only if fewer names are added between two pages than a page has.
        """
        over = list(self._over)
        for start in range(0, max(1, len(over)), num_buckets):
            yield [name for name in over[start : start + num_buckets] if name in self._over]
        start = 0
        while start < self.num_buckets:  # ascending, because a split moves names to higher buckets only
            end = min(start + num_buckets, self.num_buckets)
            is_taken = self._tags.all[start:end] != 0
            yield names_of(self._rows.all.take(self._places.all[start:end][is_taken], axis=0))
            start = end

    def give_back(self) -> bool:
        """Free a part of the memory and return whether any is left. The set is unusable after the first call."""
        self._over.clear()
        return any(part.give_back() for part in self._parts)

    def _are_found(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return for each name in *rows* whether it is in the set, after looking up each in the hash table."""
        tags = _tags(rows)
        buckets = self._buckets(tags)
        found = self._places_of(rows, tags, buckets) >= 0
        if self._over:
            missing = np.flatnonzero(~found)
            for i in missing[self._is_over.all.take(buckets.take(missing))].tolist():
                found[i] = rows[i].tobytes() in self._over
        return found

    def _are_beside(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return for each name in *rows* whether it is in the set, as far as a fast check finds it.

        The names of a prompt are usually added one after another, in either order, so their rows are adjacent.
        Comparing names with adjacent rows takes a quarter of the time of looking up each in the hash table, because it
        causes fewer CPU cache misses.
        """
        found = np.zeros(len(rows), np.bool_)
        samples = np.ascontiguousarray(rows[::STRIDE])
        tags = _tags(samples)
        places = self._places_of(samples, tags, self._buckets(tags))
        steps = np.diff(places)
        is_there = (places[1:] >= 0) & (places[:-1] >= 0)
        num_up, num_down = (int(np.count_nonzero(is_there & (steps == step))) for step in (STRIDE, -STRIDE))
        if max(num_up, num_down) * MIN_SHARE < len(steps):
            return found
        beside = places[:, None] + np.arange(STRIDE) * (1 if num_up >= num_down else -1)
        beside[places < 0] = 0
        beside = beside.reshape(-1)[: len(rows)].clip(0, self._num_rows - 1)
        return _are_equal(self._rows.all.take(beside, axis=0), rows)

    def _places_of(
        self, rows: Rows, tags: npt.NDArray[np.uint32], buckets: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.int64]:
        """Return for each name in *rows* the index of its row in the set; -1 if no bucket has the name."""
        found = np.full(len(rows), -1)
        hits = np.flatnonzero(self._tags.all.take(buckets, axis=0) == tags[:, None])
        if len(hits):
            which = hits >> 4
            places = self._places.all.reshape(-1).take((buckets.take(which) << 4) + (hits & (WIDTH - 1)))
            is_it = _are_equal(self._rows.all.take(places, axis=0), rows.take(which, axis=0))
            found[which[is_it]] = places[is_it]
        return found

    def _position(self, name: BlockName) -> int | None:
        """Return the name's index in the flattened `_tags` and `_places`; None if no bucket has the name."""
        tag, bucket = self._tag_and_bucket(name)
        wanted, start, end = tag.to_bytes(TAG_BYTES, "little"), bucket * BUCKET_BYTES, (bucket + 1) * BUCKET_BYTES
        find = self._tags.memory.find
        at = find(wanted, start, end)
        while at >= 0:
            if not at % TAG_BYTES:
                row = self._places.items[at // TAG_BYTES] * NAME_BYTES
                if self._rows.memory[row : row + NAME_BYTES] == name:
                    return at // TAG_BYTES
            at = find(wanted, at + 1, end)
        return None

    def _tag_and_bucket(self, name: BlockName) -> tuple[int, int]:
        tag = int.from_bytes(name[:TAG_BYTES], "little") | 1
        bucket = (tag >> 1) & (2 * self._level - 1)
        return tag, bucket if bucket < self.num_buckets else bucket - self._level

    def _buckets(self, tags: npt.NDArray[np.uint32]) -> npt.NDArray[np.intp]:
        buckets = ((tags >> 1) & (2 * self._level - 1)).astype(np.intp)
        buckets -= (buckets >= self.num_buckets) * self._level
        return buckets

    def _put(
        self,
        rows: Rows,
        tags: npt.NDArray[np.uint32],
        buckets: npt.NDArray[np.intp],
        places: npt.NDArray[np.uint32],
    ) -> None:
        """Add the names in *rows*, which are new and sorted by bucket. Names that find no room go into `_over`.

        *places* are the rows of the set that the names get.
        """
        while len(buckets):
            is_first = np.diff(buckets, prepend=-1) != 0  # each pass of the loop puts one name into each bucket
            used = self._used.all.take(buckets)
            has_room = used != USED_UP
            goes = is_first & has_room
            if not has_room.all():
                self._is_over.all[buckets[~has_room]] = True
                self._over.update(names_of(rows[~has_room]))
                self._give_up_rows(places[~has_room])
            self._put_one_each(rows[goes], tags[goes], buckets[goes], used[goes], places[goes])
            rest = ~is_first & has_room
            rows, tags, buckets, places = rows[rest], tags[rest], buckets[rest], places[rest]

    def _put_one_each(
        self,
        rows: Rows,
        tags: npt.NDArray[np.uint32],
        buckets: npt.NDArray[np.intp],
        used: npt.NDArray[np.uint16],
        places: npt.NDArray[np.uint32],
    ) -> None:
        """Write names into distinct buckets that have room."""
        lowest_free = ~used & (used + 1)
        self._used.all[buckets] = used | lowest_free
        positions = (buckets << 4) + np.bitwise_count(lowest_free - 1)
        self._rows.all[places] = rows
        self._tags.all.reshape(-1)[positions] = tags
        self._places.all.reshape(-1)[positions] = places
        self._num_in_buckets += len(rows)

    def _take_rows(self, num_rows: int) -> npt.NDArray[np.uint32]:
        """Allocate rows for *num_rows* names. The rows of discarded names are used first."""
        cut = max(0, len(self._free) - num_rows)
        freed = self._free[cut:]
        del self._free[cut:]
        start = self._num_rows
        self._num_rows += num_rows - len(freed)
        self._rows.grow(self._num_rows)
        return np.concatenate([np.asarray(freed), np.arange(start, self._num_rows, dtype=np.uint32)])

    def _give_up_rows(self, places: npt.NDArray[np.uint32]) -> None:
        self._rows.all[places] = np.frombuffer(FREE, np.uint64)
        self._free.frombytes(places.tobytes())

    def _split(self, num_buckets: int) -> None:
        """Split the next *num_buckets* buckets by moving about half of their names to new buckets."""
        first, new, num = self.num_buckets - self._level, self.num_buckets, num_buckets
        for part in (self._tags, self._places, self._used, self._is_over):
            part.grow(new + num)
        tags, used = self._tags.all, self._used.all
        goes = (tags[first : first + num] >> 1) & self._level != 0
        tags[new : new + num] = tags[first : first + num] * goes
        tags[first : first + num] *= ~goes
        used[new : new + num] = np.packbits(goes, axis=1, bitorder="little").view(np.uint16)[:, 0]
        used[first : first + num] ^= used[new : new + num]
        for part in (self._places, self._is_over):
            part.all[new : new + num] = part.all[first : first + num]
        self.num_buckets += num
        if self.num_buckets == 2 * self._level:
            self._level = self.num_buckets


def _tags(rows: Rows) -> npt.NDArray[np.uint32]:
    """Return the tag of each name: its first 4 bytes, with one bit set so that no tag is 0 (free place in a bucket)."""
    return rows.view(np.uint32)[:, 0] | np.uint32(1)


def _are_equal(these: Rows, others: Rows) -> npt.NDArray[np.bool_]:
    """Return for each row of the first array whether it is equal to the same row of the second array."""
    unequal = these ^ others
    is_equal: npt.NDArray[np.bool_] = (unequal[:, 0] | unequal[:, 1] | unequal[:, 2] | unequal[:, 3]) == 0
    return is_equal


def _first_ones(rows: Rows, twice: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Return for each row, which is a name, whether it is the first one with this name.

    Equal names have equal tags, and the rows are sorted by tag. *twice* has each index i where the rows i and i + 1
    have the same tag, so only these rows are compared.
    """
    is_first = np.ones(len(rows), np.bool_)
    seen = set[bytes]()
    for i in sorted({*twice.tolist(), *(twice + 1).tolist()}):
        name = rows[i].tobytes()
        is_first[i] = name not in seen
        seen.add(name)
    return is_first
