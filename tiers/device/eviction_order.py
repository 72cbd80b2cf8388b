"""EvictionOrder: the slots whose blocks may be evicted, in the order in which they were freed.

`Runs` stores which block is in each slot.
"""

import mmap
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.slot_ids import MANY, NOTHING, Ids, view_of
from kvtier.tiers.naming.block_hash import BlockName

STEP_BYTES = 1 << 20  # growth step of an array of at least this size
BACK_BYTES = 4 << 20  # bytes freed per call of `give_back`, which takes a fifth of a millisecond
# A spot is a number that says which block a slot holds: its run (consecutive blocks of a prompt) and its place there.
NO_SPOT = -1  # the spot of a slot without a named block
ALONE = -2  # spots from here downwards belong to slots whose named block is in no run
PLACE_BITS = 32  # low bits of a spot, which hold the place; the bits above hold the run's id
PLACES = (1 << PLACE_BITS) - 1  # mask of these bits
MIDDLE = 1 << 31  # place of the first block of a run that may grow at both ends
MAX_JOINED = 4096  # maximum number of blocks of a run of joined rows: joining at its front copies its names
MAX_OPEN = 512  # runs that a row before them can be joined to
PIECE = 256  # names compared at once
SHARE = 4  # a run with less than 1/SHARE of its blocks left drops the names of its tail
NO_PLACE = -1  # the place of a slot that is not in the order
FEW = 16  # minimum number of slots examined at the eviction end
SWEPT = 2  # entries swept per appended entry, so that the order grows by at most half during a sweep
MAX_PLACES = 1 << 30  # beyond this number, places are counted from 0 again, before 32 bits overflow
LOOKED_AHEAD = 16  # slots examined at the eviction end per slot wanted now
MAX_LOOKED_AT = 1024  # limit on the slots examined at the eviction end, unless more are wanted now


class GrowingRows:
    """A growable array of rows of *width* numbers, initially zero, that grows without copying its content.

    The kernel resizes the memory with mremap, so growing takes 5 µs at any size. Numpy arrays, lists and sets would
    copy their whole content. `give_back` frees the memory in steps, because freeing 600 MB at once takes 27 ms.

    *all* is a numpy view of the rows, *items* a view of the single numbers, and *memory* the raw bytes. Callers must
    not keep these views, because growing or freeing the memory raises BufferError while another view exists.
    """

    def __init__(self, dtype: npt.DTypeLike, width: int) -> None:
        self._dtype = np.dtype(dtype)
        self._width = width
        self._row_bytes = self._dtype.itemsize * width
        # A private mapping, because a shared one cannot grow beyond its first size.
        self.memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view()

    def grow(self, num_rows: int) -> None:
        """Grow to at least *num_rows* rows."""
        if num_rows > len(self.all):
            num_bytes = num_rows * self._row_bytes
            step_bytes = min(max(len(self.memory), mmap.PAGESIZE), STEP_BYTES)
            self._resize(-(-num_bytes // step_bytes) * step_bytes)

    def drop(self, num_rows: int, num_kept: int) -> None:
        """Drop the first *num_rows* rows and move the next *num_kept* to the front.

        Takes 0.2 ms for a million numbers.
        """
        self.memory.move(0, num_rows * self._row_bytes, num_kept * self._row_bytes)

    def give_back(self) -> bool:
        """Free the last few MiB of the array's memory. Returns True while some is left."""
        if self.memory.closed:
            return False
        left = len(self.memory) - BACK_BYTES
        if left > 0:
            self._resize(-(-left // mmap.PAGESIZE) * mmap.PAGESIZE)
            return True
        self._let_go()
        self.memory.close()
        return False

    def _resize(self, num_bytes: int) -> None:
        self._let_go()
        self.memory.resize(num_bytes)
        self._view()

    def _view(self) -> None:
        num_rows = len(self.memory) // self._row_bytes
        self.items = cast("memoryview[int]", memoryview(self.memory).cast(self._dtype.char))  # type: ignore[arg-type]
        items: npt.NDArray[Any] = np.frombuffer(self.memory, self._dtype, num_rows * self._width)
        self.all = items.reshape(num_rows, self._width) if self._width > 1 else items

    def _let_go(self) -> None:
        self.items.release()
        del self.all, self.items


@dataclass(slots=True)
class Run:
    """Consecutive blocks of a prompt, which were put into the pool one after another.

    In *names*, the names of the run's blocks start at index *first*. There may be names of other blocks of the prompt
    before and after them. A list that belongs to a caller may only grow at its end. A run of joined rows has its own
    list. It has only the names of the run's blocks and of the block before them, and may grow at both ends.
    """

    names: list[BlockName]
    first: int
    slots: "array[int]"  # the slots that the blocks were put in
    base: int = 0  # place of the first block; the others follow. It only changes if blocks are joined before the first
    is_joined: bool = False  # whether the list of names belongs to the run, so that rows may be joined to it
    num_left: int = 0  # number of blocks that are still in their slots

    @property
    def offset(self) -> int:
        """Number to add to the place of a block, which gives the index of its name in *names*."""
        return self.first - self.base


class Span(NamedTuple):
    """A part `slots[start:end]` of a list of slots. It holds consecutive blocks of a prompt, the last block first.

    *run_id* is the id of the `Run` (a record of consecutive blocks of a prompt) that contains these blocks, and *place*
    is the place of the block of `slots[start]` in it. If a block is in no run, its span contains only this block, and
    *run_id* is -1 (`NO_SPOT`).
    """

    start: int
    end: int
    run_id: int
    place: int


class NamedSpan(NamedTuple):
    """A `Span` with the names of its consecutive blocks, the last block first.

    *parent* is the name of the block before them in the prompt; None if there is no such block or it is unknown.
    """

    start: int
    end: int
    names: list[BlockName]
    parent: BlockName | None


def names_in(rows: Sequence[NamedSpan]) -> list[BlockName]:
    """Return the names of all blocks in *rows*. The caller must not change the list: it may belong to a row."""
    return rows[0].names if len(rows) == 1 else [name for row in rows for name in row.names]


class Runs:
    """A record of the named block in each slot. Consecutive blocks of a prompt form a *run*, for faster lookups.

    A lookup by name takes 43 ns per name in a pool of 10,000 slots and 80 to 170 ns in a pool of a million, because of
    CPU cache misses. A lookup in a run takes 11 to 14 ns, because the names and slots of a run are adjacent in memory.
    The blocks of a request form one run even if the request computes and commits them in several chunks.

    A slot's *spot* is a number: its high bits are the id of the run that the slot's block belongs to, its low bits are
    the block's place in the run. So consecutive blocks have consecutive spots, and one numpy call writes, compares or
    clears all of them. This is fast even for chunks of only 32 blocks.

    A prompt's blocks come to a lower tier in many short rows, the last row of the prompt first. `add_row` joins each
    row to the run that it continues, or that continues it.
    """

    def __init__(self, num_slots: int) -> None:
        self.spots = array("q", [NO_SPOT]) * num_slots  # [slot] NO_SPOT if not named; only `Runs` modifies it
        # A numpy view of the same memory.
        self._all_spots = np.frombuffer(self.spots, np.int64) if num_slots else np.empty(0, np.int64)
        self._runs: dict[int, Run] = {}
        self._next = 0
        # The runs that a row can be joined to at the front, by the name of the block before the run.
        self._open: OrderedDict[BlockName, int] = OrderedDict()
        self._alone: dict[int, BlockName] = {}  # names of slots that are in no run
        self._next_alone = ALONE

    def add(
        self, before: int | None, names: list[BlockName], start: int, slots: Sequence[int] | npt.NDArray[np.intp]
    ) -> None:
        """Record that the blocks in *slots* got the names `names[start]`, `names[start + 1]` and so on.

        *before* is the slot of the preceding block of the prompt; None if that block is not in the pool.
        """
        run_id = NO_SPOT if before is None else self.spots[before] >> PLACE_BITS
        run = self._runs.get(run_id)
        if run is None or run.names is not names or run.first + len(run.slots) != start:
            run_id, self._next = self._next, (self._next + 1) % (1 << 31)
            run = self._runs[run_id] = Run(names, start, array("i"))
        spot, num_slots = (run_id << PLACE_BITS) + len(run.slots), len(slots)
        run.num_left += num_slots
        if num_slots == 1:
            slot = int(slots[0])
            self.spots[slot] = spot
            run.slots.append(slot)
            return
        ids = np.asarray(slots, np.intp)
        self._all_spots[ids] = np.arange(spot, spot + num_slots)
        run.slots.frombytes(ids.astype(np.int32).tobytes())

    def add_row(self, before: int | None, names: list[BlockName], start: int, ids: npt.NDArray[np.intp]) -> None:
        """Record that the blocks in the slots *ids* got the names `names[start]` and so on, up to the end of the list.

        *start* is 1 if the list begins with the name of the preceding block of the prompt, otherwise 0. *before* is the
        slot of that block; None if it is not in the pool. The list then belongs to this record.
        """
        num_slots, slots = len(ids), array("i", ids.astype(np.int32).tobytes())
        run_id = self._open.pop(names[-1], NO_SPOT)
        run = self._runs.get(run_id)
        if run is not None and len(run.slots) + num_slots <= MAX_JOINED:
            run.names[: run.first] = names
            run.slots[:0] = slots
            run.first, run.base = start, run.base - num_slots
            spot = (run_id << PLACE_BITS) + run.base
        elif num_slots == 1 and not start:
            self.add_alone(int(ids[0]), names[0])
            return
        else:
            last = NO_SPOT if before is None else self.spots[before]
            run_id, spot = last >> PLACE_BITS, last + 1
            run = self._runs.get(run_id)
            if (
                run is not None
                and run.is_joined
                and run.base + len(run.slots) == spot & PLACES
                and len(run.slots) + num_slots <= MAX_JOINED
            ):
                run.names += names[1:]
                run.slots += slots
            else:
                run_id, self._next = self._next, (self._next + 1) % (1 << 31)
                run = self._runs[run_id] = Run(names, start, slots, MIDDLE, is_joined=True)
                spot = (run_id << PLACE_BITS) + MIDDLE
        run.num_left += num_slots
        self._all_spots[ids] = np.arange(spot, spot + num_slots)
        if start and before is None:  # the row before this one may come later
            self._open[names[0]] = run_id
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)

    def add_alone(self, slot: int, name: BlockName) -> None:
        """Record the name of the block in *slot*. The block before it in the prompt stays unknown."""
        self.spots[slot] = self._next_alone
        self._next_alone -= 1
        self._alone[slot] = name

    def remove(self, slots: npt.NDArray[np.intp]) -> list[BlockName]:
        """Remove the blocks in these slots and return their names, perhaps in another order than *slots*."""
        if not len(slots):
            return []
        spots = self._all_spots[slots]
        self._all_spots[slots] = NO_SPOT
        first, last = int(spots[-1]), int(spots[0])
        is_row = first >= 0 and last - first == len(spots) - 1
        if is_row and spots.tobytes() == np.arange(last, first - 1, -1).tobytes():  # typical for an evicted tail
            return self._take_out(first >> PLACE_BITS, range(last & PLACES, (first & PLACES) - 1, -1))
        runs, names = spots >> PLACE_BITS, []
        for run_id in np.unique(runs[spots >= 0]).tolist():
            names += self._take_out(run_id, (spots[runs == run_id] & PLACES).tolist())
        return names + [self._alone.pop(slot) for slot in slots[spots <= ALONE].tolist()]

    def spans(self, slots: npt.NDArray[np.intp]) -> list[Span]:
        """Split the list *slots* into parts, each of which holds consecutive blocks of a prompt, the last block first.

        All slots must hold named blocks.
        """
        spots = self._all_spots[slots]
        is_last = np.empty(len(spots), np.bool_)
        np.not_equal(spots[:-1], spots[1:] + 1, out=is_last[:-1])
        is_last[-1:] = True
        if len(spots) and spots.min() < 0:
            is_alone = spots < 0
            is_last |= is_alone
            is_last[:-1] |= is_alone[1:]
        ends = np.flatnonzero(is_last) + 1
        starts = [0, *ends[:-1].tolist()]
        return [
            Span(start, end, spot >> PLACE_BITS, spot & PLACES) if spot >= 0 else Span(start, end, NO_SPOT, 0)
            for start, end, spot in zip(starts, ends.tolist(), spots[starts].tolist(), strict=True)
        ]

    def rows(self, slots: npt.NDArray[np.intp]) -> list[NamedSpan]:
        """Split the list *slots* like `spans`, and add the names of the blocks.

        Each part holds consecutive blocks of a prompt, the last block first. All slots must hold named blocks.
        """
        rows = []
        for start, end, run_id, place in self.spans(slots) if len(slots) else ():
            if run_id == NO_SPOT:
                rows.append(NamedSpan(start, end, [self._alone[int(slots[start])]], None))
                continue
            before, run = place - (end - start), self._runs[run_id]
            names = self._names(run_id, range(place, before, -1))
            before += run.offset
            rows.append(NamedSpan(start, end, names, None if before < 0 else run.names[before]))
        return rows

    def remove_spans(self, slots: npt.NDArray[np.intp], spans: Sequence[Span]) -> list[BlockName]:
        """Remove the blocks in *slots* and return their names. *spans* is what `spans` returns for these slots."""
        self._all_spots[slots] = NO_SPOT
        if len(spans) == 1 and spans[0].run_id != NO_SPOT:  # typical
            start, end, run_id, place = spans[0]
            return self._take_out(run_id, range(place, place - (end - start), -1))
        names: list[BlockName] = []
        num_gone: dict[int, int] = {}  # removals by run, applied once per run because `_shrink` searches the rest
        for start, end, run_id, place in spans:
            if run_id == NO_SPOT:
                names.append(self._alone.pop(int(slots[len(names)])))
            else:
                names += self._names(run_id, range(place, place - (end - start), -1))
                num_gone[run_id] = num_gone.get(run_id, 0) + end - start
        for run_id, num_slots in num_gone.items():
            self._shrink(run_id, num_slots)
        return names

    def clear(self) -> tuple[dict[int, Run], dict[int, BlockName]]:
        """Remove all blocks at once.

        Returns the former runs by id, and the former names of the slots that were in no run. The caller frees them.
        """
        runs, alone = self._runs, self._alone
        self._runs, self._alone = {}, {}
        self._open.clear()
        self._all_spots.fill(NO_SPOT)
        return runs, alone

    def name(self, slot: int) -> BlockName | None:
        """Return the name of the block in the slot; None if it has no name."""
        spot = self.spots[slot]
        if spot < 0:
            return self._alone[slot] if spot <= ALONE else None
        run = self._runs[spot >> PLACE_BITS]
        return run.names[run.offset + (spot & PLACES)]

    def parent(self, slot: int) -> BlockName | None:
        """Return the name of the block before the slot's block in its prompt; None if none is known."""
        spot = self.spots[slot]
        if spot < 0:
            return None
        run = self._runs[spot >> PLACE_BITS]
        before = run.offset + (spot & PLACES) - 1
        return None if before < 0 else run.names[before]

    def following(self, slot: int, names: Sequence[BlockName], start: int) -> npt.NDArray[np.int32]:
        """Return the slots of `names[start]`, `names[start + 1]` and so on, as long as the blocks are in the same run.

        A run is blocks of a prompt that were added one after another. *slot* is the slot of `names[start]`. If its
        block is in no run, the result is empty.
        """
        spot = self.spots[slot]
        if spot < 0:
            return np.empty(0, np.int32)
        run = self._runs[spot >> PLACE_BITS]
        index = (spot & PLACES) - run.base
        limit = min(len(names) - start, len(run.slots) - index)
        there = run.first + index
        num_equal = 0
        while num_equal < limit:
            end = min(num_equal + PIECE, limit)
            ours, theirs = names[start + num_equal : start + end], run.names[there + num_equal : there + end]
            if ours != theirs:
                num_equal += next(i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
                break
            num_equal = end
        slots = np.frombuffer(run.slots[index : index + num_equal], np.int32)
        gone = self._all_spots[slots] != np.arange(spot, spot + num_equal)
        return slots[: int(gone.argmax())] if gone.any() else slots

    def check(self) -> None:
        """Raise AssertionError if this record of the block in each slot is inconsistent."""
        for run_id, run in self._runs.items():
            slots = np.array(run.slots, np.int32)
            here = self._all_spots[slots] == (run_id << PLACE_BITS) + run.base + np.arange(len(slots))
            num_here = np.count_nonzero(self._all_spots >> PLACE_BITS == run_id)
            assert np.count_nonzero(here) == num_here, "a slot has no place in its run"
            assert num_here == run.num_left > 0, "a run's blocks were miscounted"
            is_whole = run.first <= 1 and len(run.names) == run.first + len(run.slots)
            assert is_whole or not run.is_joined, "a run of joined rows has other names than those of its blocks"
        in_runs = np.unique(self._all_spots[self._all_spots >= 0] >> PLACE_BITS).tolist()
        assert set(in_runs) == self._runs.keys(), "a slot is in a run that does not exist"
        alone = set(np.flatnonzero(self._all_spots <= ALONE).tolist())
        assert alone == self._alone.keys(), "a name is kept for a slot without a block"

    def _take_out(self, run_id: int, places: Sequence[int]) -> list[BlockName]:
        names = self._names(run_id, places)
        self._shrink(run_id, len(places))  # examines the spots that are left, so the caller has cleared these
        return names

    def _names(self, run_id: int, places: Sequence[int]) -> list[BlockName]:
        run = self._runs[run_id]
        names, first = run.names, run.offset
        if isinstance(places, range):  # a descending one
            end = first + places.stop
            return names[first + places.start : end if end >= 0 else None : -1]
        return [names[first + place] for place in places]

    def _shrink(self, run_id: int, num_slots: int) -> None:
        run = self._runs[run_id]
        run.num_left -= num_slots
        if run.num_left == 0:
            del self._runs[run_id]
        elif run.num_left < len(run.slots) // SHARE:
            left = np.array(run.slots, np.int32)
            spot = (run_id << PLACE_BITS) + run.base
            end = int(np.flatnonzero(self._all_spots[left] == np.arange(spot, spot + len(left)))[-1]) + 1
            if end < len(run.slots) // 2:  # the tail is gone, so drop its names
                begin = max(0, run.first - 1)  # keep the parent's name
                run.names = run.names[begin : run.first + end]
                run.first, run.slots = run.first - begin, run.slots[:end]


@dataclass(slots=True)
class Front:
    """The next slots to evict, *ids*, looked up in advance for many evictions.

    *begin* is the place of the first of these slots in the eviction order. *spans* divides *ids* into parts that hold
    consecutive blocks of a prompt.
    """

    begin: int
    ids: Ids
    spans: list[Span]
    next_span: int = 0  # index of the first span that was not removed

    def take(self, start: int, end: int) -> list[Span]:
        """Return `ids[start:end]` divided into spans, which are parts that hold consecutive blocks of a prompt.

        The spans' indices refer to *ids*. *start* must not be less than *end* of the previous call.
        """
        taken = []
        while start < end:
            span = self.spans[self.next_span]
            if span.end > start:
                upto = min(span.end, end)
                taken.append(Span(start, upto, span.run_id, span.place - (start - span.start)))
                start = upto
            self.next_span += span.end <= end
        return taken


@dataclass(slots=True)
class Sweep:
    """Progress of a compaction of the eviction order, which moves all valid entries to the end, the last entry first.

    *read* and *written* are places in the order. All entries from *read* on have been examined, and the valid ones
    among them have been moved to *written* and later. So there is no valid entry from *read* to *written* - 1.
    """

    read: int
    written: int


class EvictionOrder:
    """A queue of distinct slots, the first of which is evicted next. Owned by its pool.

    Slots that are *lent* to a copy stay in the queue, but are skipped.

    The entries of the queue are numbered. `_places` has for each slot the number of its entry, called the slot's
    *place*. Removing a slot changes only `_places` or moves the head, and leaves an invalid entry behind. So it needs
    no search. All entries before the head are invalid.

    Once there are as many invalid entries as slots, each call moves some of the valid entries towards the end
    (`Sweep`), until the space of the invalid entries can be freed. Many slots are handled by numpy calls, a few slots
    by array accesses, which are as fast as those of a list.
    """

    def __init__(self, num_slots: int, runs: Runs) -> None:
        """Create an empty queue of slots. *runs* records which named block is in each slot of the pool."""
        self.num_slots = 0  # slots in the order, including lent ones
        self.num_lent = 0  # slots in the order that are lent to a copy
        self.num_departures = 0  # how many times a slot has left the order since the start
        self._runs = runs
        self._places = array("i", [NO_PLACE]) * num_slots  # [slot]
        self._all_places = view_of(self._places)
        self._is_lent = np.zeros(num_slots, np.bool_)
        self._rows = GrowingRows(np.int32, 1)  # the entries: slots in the order in which they were freed
        self._before = 0  # place of the first entry
        self._end = 0  # place of the next slot to be appended
        self._num_recounted = 0  # total by which `_recount` has lowered the places
        self._max_entries = 2 * num_slots + MANY  # a sweep begins beyond this number
        self._sweep: Sweep | None = None
        self._head = 0  # entries before this place are invalid
        self._front = Front(0, NOTHING, [])
        self._front_end = 0  # `_front` is valid from the head up to this place
        self._front_limit = 0  # the value that `_front_end` would have if no slot were lent
        self._given = NOTHING  # the part of `_front` that `victims` returned last

    def append_few(self, slots: list[int]) -> None:
        """Append a few slots to the queue. None of them may be in the queue already."""
        before, places = self._before, self._places
        self._rows.grow(self._end - before + len(slots))
        items, place = self._rows.items, self._end
        for slot in slots:
            places[slot] = place
            items[place - before] = slot
            place += 1
        self._end = place
        self.num_slots += len(slots)
        self._tidy(SWEPT * len(slots) + MANY)

    def append(self, ids: Ids) -> None:
        """Append many slots at once, none of which may be in the queue already."""
        self._all_places[ids] = np.arange(self._end, self._end + len(ids), dtype=np.int32)
        first = self._end - self._before
        self._rows.grow(first + len(ids))
        self._rows.all[first : first + len(ids)] = ids
        self._end += len(ids)
        self.num_slots += len(ids)
        self._tidy(SWEPT * len(ids) + MANY)

    def remove_few(self, slots: list[int]) -> None:
        """Remove these slots from the queue. Slots that are not in the queue are ignored."""
        places, head = self._places, self._head
        for slot in slots:
            place = places[slot]
            if place >= head:
                if place < self._front_limit:
                    self._shorten_front(place)
                places[slot] = NO_PLACE
                self.num_slots -= 1
                self.num_departures += 1
                if self.num_lent and self._is_lent[slot]:
                    self._is_lent[slot] = False
                    self.num_lent -= 1

    def remove(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Remove many slots at once, like `remove_few`, and return for each whether it was in the order."""
        was_here = self.holds(ids)
        leaving = ids[was_here]
        self._leave_front(leaving)
        self._all_places[ids] = NO_PLACE
        self.num_slots -= len(leaving)
        self.num_departures += len(leaving)
        if self.num_lent:
            self.num_lent -= int(np.count_nonzero(self._is_lent[leaving]))
            self._is_lent[leaving] = False
        self._tidy(SWEPT * len(ids) + MANY)
        return was_here

    def lend(self, ids: Ids) -> None:
        """Skip these slots, which are lent to a copy, until `put_back`. They keep their places in the order."""
        assert self.holds(ids).all(), "a slot is blank: there is nothing to copy"
        if len(ids) and self._head < self._front_end:
            self._front_end = min(self._front_end, int(self._all_places[ids].min()))
        self._is_lent[ids] = True
        self.num_lent += len(ids)

    def put_back(self, ids: Ids) -> None:
        """Make these slots, which `lend` has lent to a copy, available for eviction again."""
        self._is_lent[ids] = False
        self.num_lent -= len(ids)
        if not self.num_lent:
            self._front_end = self._front_limit

    def holds(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return for each slot whether it is in the order."""
        return self._all_places[ids] >= self._head

    def clear(self) -> None:
        """Remove all slots at once, including lent ones, which must not be given to `put_back` afterwards."""
        if self.num_lent:
            self._is_lent.fill(False)
        self.num_departures += self.num_slots
        self.num_slots = self.num_lent = 0
        self._head = self._end  # invalidates all entries
        self._front, self._given = Front(self._end, NOTHING, []), NOTHING
        self._front_end = self._front_limit = self._end

    def place(self, slot: int) -> int | None:
        """Return the slot's place in the order; the lowest place is evicted first. None if the slot is not in it."""
        return self._places[slot] + self._num_recounted if self._places[slot] >= self._head else None

    def newest(self) -> int | None:
        """Return the slot that was freed last; None if it has left the order."""
        if self._head >= self._end:
            return None
        slot = self._rows.items[self._end - self._before - 1]
        return slot if self._places[slot] == self._end - 1 else None

    def victims(self, num_slots: int) -> Ids:
        """Return the next slots to evict, up to *num_slots*. They stay in the order until `take`."""
        start = self._head - self._front.begin
        if self._head + num_slots > self._front_end:
            self._look_ahead(num_slots)
            start = 0
        if self._head + num_slots <= self._front_end:
            self._given = self._front.ids[start : start + num_slots]
            return self._given
        oldest = self.oldest(num_slots + self.num_lent)
        return oldest if len(oldest) <= num_slots else oldest[:num_slots]

    def take(self, victims: Ids) -> list[Span] | None:
        """Remove the slots *victims* from the queue. None of them may be lent (being copied to a lower tier).

        Returns the slots' spans, as `Runs.spans` does, if the method `victims` has computed them; otherwise None.
        """
        num_taken, spans = len(victims), None
        if victims is self._given and num_taken:
            start = self._head - self._front.begin
            self._given = NOTHING
            self._head += num_taken  # invalidates their entries
            spans = self._front.take(start, start + num_taken)
        elif self._count(victims, self._head).all():
            self._head += num_taken
        else:
            self._leave_front(victims)
            self._all_places[victims] = NO_PLACE
        self.num_slots -= num_taken
        self.num_departures += num_taken
        return spans

    def oldest(self, window: int) -> Ids:
        """Return the slots that are evicted next: the first *window* of the order, without those lent to a copy."""
        found: list[Ids] = []
        missing, start = min(window, self.num_slots), self._head
        if self._end - start == self.num_slots:  # every entry from the head on is valid
            found, missing = [self._entries(start, start + missing)], 0
        while missing > 0:
            start = self._past_gap(start)
            piece = self._entries(start, start + missing + MANY)
            counts = self._count(piece, start)
            live = piece if counts.all() else piece[counts]
            if not found:  # move the head to the first valid entry
                self._head = start + (int(counts.argmax()) if len(live) else len(piece))
            if len(live):
                found.append(live[:missing])
            missing, start = missing - len(live), start + len(piece)
        oldest = found[0] if len(found) == 1 else np.concatenate([NOTHING, *found])
        return oldest[~self._is_lent[oldest]] if self.num_lent else oldest

    def part(self, start: int, limit: int) -> tuple[Ids, int | None]:
        """Return the slots of *limit* queue entries from place *start* on, and the *start* of the next call.

        The latter is None at the end of the queue. It stays valid if the queue changes before the next call, because
        entries only move towards the end. Slots that are lent (being copied to a lower tier) are left out.
        """
        start = max(start - self._num_recounted, self._head)
        entries = self._entries(start, start + limit)
        live, end = entries[self._count(entries, start)], start + len(entries)
        if self.num_lent:
            live = live[~self._is_lent[live]]
        return live, end + self._num_recounted if end < self._end else None

    def check(self) -> None:
        """Raise AssertionError if the order is inconsistent."""
        here = [slot for slot, place in enumerate(self._places) if place >= self._head]
        assert len(here) == self.num_slots, "the slots in the order were miscounted"
        assert all(self._rows.items[self._places[slot] - self._before] == slot for slot in here), (
            "a slot is not at its place"
        )
        lent = np.flatnonzero(self._is_lent)
        assert len(lent) == self.num_lent, "the lent slots were miscounted"
        assert self.holds(lent).all(), "a slot that is not in the order is lent"

    def _entries(self, start: int, end: int) -> Ids:
        before, end = self._before, min(end, self._end)
        return cast(Ids, self._rows.all[start - before : end - before].astype(np.intp))

    def _count(self, entries: Ids, start: int) -> npt.NDArray[np.bool_]:
        """Return for each of these consecutive entries whether it is valid. *start* is the place of the first."""
        counts: npt.NDArray[np.bool_] = self._all_places[entries] == np.arange(
            start, start + len(entries), dtype=np.int32
        )
        return counts  # not cast(), which takes 5 us for this type

    def _look_ahead(self, num_slots: int) -> None:
        """Look up the next slots to evict, for this eviction and many later ones, and store them in `_front`."""
        self._head = self._past_gap(self._head)
        start, limit = self._head, min(max(FEW, LOOKED_AHEAD * num_slots), max(MAX_LOOKED_AT, num_slots))
        ids = self._entries(start, start + limit)
        others = ~self._count(ids, start)
        if self.num_lent:
            others |= self._is_lent[ids]
        ids = ids[: int(others.argmax())] if others.any() else ids
        if len(ids):
            self._front = Front(start, ids, self._runs.spans(ids))
            self._front_end = self._front_limit = start + len(ids)

    def _leave_front(self, ids: Ids) -> None:
        if len(ids) and self._head < self._front_limit:
            self._shorten_front(int(self._all_places[ids].min()))

    def _shorten_front(self, end: int) -> None:
        """Limit `_front` to places before *end*. The limit stays in force when lent slots are put back."""
        self._front_limit = min(self._front_limit, end)
        self._front_end = min(self._front_end, end)

    def _tidy(self, num_entries: int) -> None:
        """Continue the compaction if there are many entries, and move the head past invalid entries.

        Each of these two steps examines at most *num_entries* entries.
        """
        if self._end - self._before > self._max_entries:
            self._sweep_some(num_entries)
        if self._head < self._end and self._places[self._rows.items[self._head - self._before]] != self._head:
            start = self._past_gap(self._head)
            entries = self._entries(start, start + num_entries)
            counts = self._count(entries, start)
            self._head = start + (int(counts.argmax()) if counts.any() else len(entries))

    def _sweep_some(self, num_entries: int) -> None:
        sweep = self._sweep
        if sweep is None:
            self._recount()
            sweep = self._sweep = Sweep(self._end, self._end)
        start = max(self._head, sweep.read - num_entries)
        if start < sweep.read:
            entries = self._entries(start, sweep.read)
            live = entries[self._count(entries, start)]
            self._shorten_front(start)
            end, sweep.read, sweep.written = sweep.written, start, sweep.written - len(live)
            self._all_places[live] = np.arange(sweep.written, end, dtype=np.int32)
            self._rows.all[sweep.written - self._before : end - self._before] = live
        else:  # all entries have been examined: free the space of the invalid ones
            self._head = max(self._head, sweep.written)
            self._rows.drop(self._head - self._before, self._end - self._head)
            self._before = self._head
            self._sweep = None

    def _past_gap(self, place: int) -> int:
        sweep = self._sweep
        return place if sweep is None or not sweep.read <= place < sweep.written else sweep.written

    def _recount(self) -> None:
        if self._before > MAX_PLACES:
            np.maximum(self._all_places - self._before, NO_PLACE, out=self._all_places)
            self._head -= self._before
            self._end -= self._before
            self._num_recounted += self._before
            self._before = self._front_end = self._front_limit = 0
