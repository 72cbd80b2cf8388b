"""NameTable: a map from block names to slots for large pools, in flat arrays."""

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.eviction_order import GrowingRows
from kvtier.tiers.device.slot_ids import ABSENT, Ids, Slots, view_of
from kvtier.tiers.naming.block_hash import BlockName

NAME_BYTES = 32
WIDTH = 8  # cells per bucket: the marks of a bucket fill half a cache line
BUCKET_BYTES = 4 * WIDTH
MEAN = 3  # names per bucket of a full pool, so that one name in 600 finds its bucket full
FEW = 24  # minimum number of names for which numpy calls are faster than a loop
PART = 256  # maximum number of names in each part that the iterator of `clear` yields
NUM_ROUNDS = 255  # values of a round: the lowest byte of a mark, without 0
ROUND_MASK = 0xFF
NO_CELL = -1  # the cell of a slot whose name is not in a bucket
# [bitmap of a bucket's free cells] the lowest free cell, WIDTH without one
LOWEST = np.array([(free & -free).bit_length() - 1 if free else WIDTH for free in range(1 << WIDTH)], np.intp)

Words = npt.NDArray[np.uint32]  # [names, 8]
Marks = npt.NDArray[np.uint32]


class NameTable:
    """A map from block names to the slots of a pool, with at most one name per slot. Owned by the pool's thread.

    A hash table in arrays: a name's first four bytes choose its bucket, which has eight cells. A cell has a slot and a
    *mark*: three more bytes of the slot's name, and a *round* (see below). Names with equal marks are told apart by the
    whole name, which is stored by slot. If a bucket is full, its next names go into a Python dict, and so do names that
    do not have 32 bytes. No call has to enlarge or rehash anything.

    Batches of names are looked up, added and removed by numpy calls. In a pool of a million slots, that takes a quarter
    of the time of Python dicts, because the CPU waits for the cache misses of several names at the same time. The table
    takes 30 bytes less per slot.

    The lowest byte of a mark is the *round*, which counts calls of `clear`. So cells of an earlier round are free, and
    `clear` need not visit them.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_buckets = max(1, math.ceil(num_slots / MEAN))
        self._memory = bytearray(BUCKET_BYTES * (self._num_buckets + 1))  # the marks; the last bucket is spare
        self._marks = np.frombuffer(self._memory, np.uint32)  # [cell]
        self._buckets = np.frombuffer(self._memory, f"V{BUCKET_BYTES}")  # [bucket] its marks
        self._slots = array("i", [0]) * (WIDTH * (self._num_buckets + 1))  # [cell]
        self._all_slots = view_of(self._slots)
        self._num_over = np.zeros(self._num_buckets, np.int32)  # [bucket] names in the dict because it was full
        self._cells = array("i", [NO_CELL]) * num_slots  # [slot]
        self._all_cells = view_of(self._cells)
        self._num_slots = num_slots
        self._round = 1
        self._round_byte = bytes([self._round])
        self._num_in_cells = 0
        self._begin()
        self._names.all.fill(0)  # makes the kernel allocate the memory now, and not during a commit

    def __len__(self) -> int:
        return self._num_in_cells + len(self._others)

    def items(self) -> Iterator[tuple[BlockName, int]]:
        """Yield all names and their slots."""
        num_cells = self._num_buckets * WIDTH
        for slot in self._all_slots[:num_cells][self._marks[:num_cells] & ROUND_MASK == self._round].tolist():
            yield self._name(slot), slot
        yield from self._others.items()

    def clear(self) -> Iterator[list[BlockName]]:
        """Remove all names at once.

        Returns an iterator that yields the removed names in lists, some of them empty. Then it frees the names' memory
        in parts, and yields an empty list after each part. It does not yield names that were added after the call.
        """
        removed = _removed(self._names, self._others)
        self._num_in_cells = 0
        # All marks of a round are zeroed before its number is used again.
        part = self._num_buckets * WIDTH // NUM_ROUNDS + 1
        self._marks[part * (self._round - 1) : part * self._round] = 0
        self._round = self._round % NUM_ROUNDS + 1
        self._round_byte = bytes([self._round])
        self._num_over.fill(0)
        self._begin()
        return removed

    def get(self, name: BlockName) -> int | None:
        """Return the slot of the name; None if it has no slot."""
        if len(name) != NAME_BYTES:
            return self._others.get(name)
        bucket = int.from_bytes(name[:4], "little") * self._num_buckets >> 32
        mark, start, end = self._round_byte + name[5:8], bucket * BUCKET_BYTES, (bucket + 1) * BUCKET_BYTES
        find = self._memory.find
        at = find(mark, start, end)
        while at >= 0:
            if not at & 3:
                slot = self._slots[at >> 2]
                if self._name(slot) == name:
                    return slot
            at = find(mark, at + 1, end)
        return self._others.get(name) if self._others else None

    def get_all(self, names: Sequence[BlockName], absent: int) -> npt.NDArray[np.int32]:
        """Return the slot of each name, or *absent* for names without a slot."""
        words = _words(names)
        if words is None:
            found = map(self.get, names)
            return np.array([absent if slot is None else slot for slot in found], np.int32)
        slots = self._find_all(words)
        return np.full(len(names), absent, np.int32) if slots is None else np.where(slots == ABSENT, absent, slots)

    def has_none(self, names: Sequence[BlockName]) -> bool:
        """Return whether none of the names has a slot."""
        words = _words(names)
        if words is None:
            return all(self.get(name) is None for name in names)
        return self._find_all(words) is None

    def give(self, name: BlockName, slot: int) -> int:
        """Assign *slot* to the name if the name has no slot yet, and return the slot that the name now has."""
        holder = self.get(name)
        if holder is not None:
            return holder
        if len(name) == NAME_BYTES:
            bucket = int.from_bytes(name[:4], "little") * self._num_buckets >> 32
            start = bucket * BUCKET_BYTES
            rounds = self._memory[start : start + BUCKET_BYTES : 4]
            column = next((column for column, used in enumerate(rounds) if used != self._round), WIDTH)
            if column < WIDTH:
                cell = bucket * WIDTH + column
                self._memory[4 * cell : 4 * cell + 4] = self._round_byte + name[5:8]
                self._slots[cell] = slot
                self._cells[slot] = cell
                self._names.memory[slot * NAME_BYTES : (slot + 1) * NAME_BYTES] = name
                self._num_in_cells += 1
                return slot
            self._num_over[bucket] += 1
        self._others[name] = slot
        self._other_names[slot] = name
        self._cells[slot] = NO_CELL
        self._names.all[slot, 0] = 0
        return slot

    def give_all(self, names: Sequence[BlockName], slots: Sequence[int]) -> Sequence[int]:
        """Give each name the slot at the same index, unless it has one already. Return each name's slot."""
        words = _words(names)
        if words is None:
            return list(map(self.give, names, slots))
        buckets, wanted, ids = self._buckets_of(words), self._marks_of(words), np.array(slots, np.intp)
        marks = self._buckets.take(buckets).view(np.uint32)
        found = self._find(words, buckets, wanted, marks)
        if found is not None:
            new = np.flatnonzero(found == ABSENT).tolist()
            holders = cast("list[int]", found.tolist())
            _put(holders, new, self.give_all([names[place] for place in new], [slots[place] for place in new]))
            return holders
        is_free = np.packbits(marks.view(np.uint8)[::4] != self._round, bitorder="little")
        columns = LOWEST.take(is_free)
        cells = buckets * WIDTH + columns
        full = np.flatnonzero(columns == WIDTH)
        cells[full] = self._num_buckets * WIDTH  # the spare cell
        # If several names take the same cell, the last one keeps it.
        self._all_slots[cells] = ids
        self._marks[cells] = wanted
        self._all_cells[ids] = cells
        _items(self._names.all)[ids] = _items(words)
        is_lost = self._all_slots.take(cells) != ids
        is_lost[full] = False
        lost = np.flatnonzero(is_lost).tolist()
        self._num_in_cells += len(names) - len(lost) - len(full)
        if not lost and not len(full):
            return slots
        holders = list(slots)
        _put(holders, lost, self.give_all([names[place] for place in lost], [slots[place] for place in lost]))
        for place in full.tolist():
            holders[place] = self.give(names[place], slots[place])
        for place in lost:
            if holders[place] != slots[place]:  # the same name was given twice
                self._names.all[slots[place], 0] = 0
        return holders

    def remove_all(self, slots: Slots) -> None:
        """Remove the names of these slots, which must all have one."""
        ids = np.asarray(slots, np.intp)
        cells = self._all_cells.take(ids)
        if self._others and len(ids) and cells.min() < 0:
            for slot in ids[cells < 0].tolist():
                name = self._other_names.pop(slot)
                del self._others[name]
                if len(name) == NAME_BYTES:
                    self._num_over[int.from_bytes(name[:4], "little") * self._num_buckets >> 32] -= 1
            ids, cells = ids[cells >= 0], cells[cells >= 0]
        self._marks[cells] = 0
        self._names.all[ids, 0] = 0
        self._num_in_cells -= len(cells)

    def _begin(self) -> None:
        self._others: dict[BlockName, int] = {}
        self._other_names: dict[int, BlockName] = {}  # by slot
        self._names = GrowingRows(np.uint64, NAME_BYTES // 8)  # [slot]; a row begins with 0 if its slot is in no bucket
        self._names.grow(self._num_slots)

    def _name(self, slot: int) -> BlockName:
        return cast(BlockName, self._names.memory[slot * NAME_BYTES : (slot + 1) * NAME_BYTES])

    def _buckets_of(self, words: Words) -> Ids:
        return (words[:, 0] * np.uint64(self._num_buckets) >> np.uint64(32)).astype(np.intp)

    def _marks_of(self, words: Words) -> Words:
        return (words[:, 1] & np.uint32(~ROUND_MASK & 0xFFFFFFFF)) | np.uint32(self._round)

    def _find(self, words: Words, buckets: Ids, wanted: Marks, marks: Marks) -> npt.NDArray[np.int32] | None:
        """Return the slot of each name, or ABSENT; None if no name has a slot.

        *wanted* are the marks of the names, and *marks* those in the cells of the names' *buckets*.
        """
        hits = np.flatnonzero(marks == np.repeat(wanted, WIDTH))
        over = np.flatnonzero(self._num_over.take(buckets)).tolist() if self._others else []
        if not len(hits) and not over:
            return None
        slots = np.full(len(words), ABSENT, np.int32)
        if len(hits):
            which = hits // WIDTH
            found = self._all_slots.take(buckets.take(which) * WIDTH + hits % WIDTH)
            there = _items(self._names.all).take(found).view(np.uint64)
            unequal = (there ^ _items(words).take(which).view(np.uint64)).reshape(len(hits), -1)
            is_it = (unequal[:, 0] | unequal[:, 1] | unequal[:, 2] | unequal[:, 3]) == 0
            slots[which[is_it]] = found[is_it]
        for place in over:
            if slots[place] == ABSENT:
                slots[place] = self._others.get(cast(BlockName, words[place].tobytes()), ABSENT)
        return slots if (slots != ABSENT).any() else None

    def _find_all(self, words: Words) -> npt.NDArray[np.int32] | None:
        buckets = self._buckets_of(words)
        return self._find(words, buckets, self._marks_of(words), self._buckets.take(buckets).view(np.uint32))


def _put(items: list[int], places: Sequence[int], new: Sequence[int]) -> None:
    for place, item in zip(places, new, strict=True):
        items[place] = item


def _words(names: Sequence[BlockName]) -> Words | None:
    """Return the names as rows of numbers; None if there are few, or if one of them does not have 32 bytes."""
    if len(names) < FEW:
        return None
    joined = b"".join(names)
    return np.frombuffer(joined, np.uint32).reshape(-1, WIDTH) if len(joined) == NAME_BYTES * len(names) else None


def _items(rows: npt.NDArray[np.uint32] | npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
    """Return a view of contiguous rows of 32 bytes with each row as one item."""
    return rows.reshape(-1).view(f"V{NAME_BYTES}")


def _removed(names: GrowingRows, others: dict[BlockName, int]) -> Iterator[list[BlockName]]:
    while others:
        yield [others.popitem()[0] for _ in range(min(len(others), PART))]
    for start in range(0, len(names.all), PART):
        rows = names.all[start : start + PART]
        some = np.ascontiguousarray(rows[rows[:, 0] != 0])
        del rows  # a view would keep the memory from being freed
        yield cast("list[BlockName]", _items(some).tolist())
    while names.give_back():
        yield []
