"""EvictionOrder: the slots whose blocks may be evicted, in the order in which they became free."""

import mmap
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.slot_ids import MANY, NOTHING, Ids, view_of
from kvtier.tiers.naming.block_hash import BlockName

STEP_BYTES = 1 << 20  # by which an array of that size or more grows at a time …
BACK_BYTES = 4 << 20  # … and which it gives back at a time: a fifth of a millisecond
NO_SPOT = -1  # the spot of a slot without a named block
ALONE = -2  # this and lower ones are the spots of slots whose block has a name but is in no run
PLACE_BITS = 32
PLACES = (1 << PLACE_BITS) - 1
PIECE = 256  # names compared at once
SHARE = 4  # a run with less than this part of its blocks left forgets the names of its tail
NO_PLACE = -1  # of a slot that is not in the order
FEW = 16
SWEPT = 2  # entries for each that is appended: while the order is swept it grows by half of what it has
MAX_PLACES = 1 << 30
LOOKED_AHEAD = 16  # times as many slots at the eviction end are looked at as are wanted now
MAX_LOOKED_AT = 1024


class GrowingRows:
    """Rows of *width* numbers, zeros at first, in memory that the kernel moves by its page tables (mremap): growing by
    a step takes 5 µs at any size, where numpy, lists and sets copy all they have. Freeing 600 MB at once takes 27 ms.

    *all* is the rows for numpy, *items* their numbers one at a time, *memory* their bytes. Keep no view of them while
    the array grows or is given back: BufferError.
    """

    def __init__(self, dtype: npt.DTypeLike, width: int) -> None:
        self._dtype = np.dtype(dtype)
        self._width = width
        self._row_bytes = self._dtype.itemsize * width
        # Private: a shared one cannot grow beyond what it began with.
        self.memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view()

    def grow(self, num_rows: int) -> None:
        """Grow to at least that many rows."""
        if num_rows > len(self.all):
            num_bytes = num_rows * self._row_bytes
            step_bytes = min(max(len(self.memory), mmap.PAGESIZE), STEP_BYTES)
            self._resize(-(-num_bytes // step_bytes) * step_bytes)

    def drop(self, num_rows: int, num_kept: int) -> None:
        """Drop the first *num_rows* rows: *num_kept* after them move to the front, 0.2 ms for a million numbers."""
        self.memory.move(0, num_rows * self._row_bytes, num_kept * self._row_bytes)

    def give_back(self) -> bool:
        """Give some of the memory back, from the end on; whether more is left."""
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
    """Block *first* of a chain and blocks after it. *names* is the chain's list of all its names, which only grows."""

    names: Sequence[BlockName]
    first: int
    slots: "array[int]"
    num_left: int = 0  # blocks that are still in their slots


class Span(NamedTuple):
    """Blocks of one run in a row, the last one first: *start* to before *end* of the slots that were asked for. *place*
    is the first one's place in the run. A block in no run is a span by itself, of run NO_SPOT."""

    start: int
    end: int
    run_id: int
    place: int


class Row(NamedTuple):
    """The blocks of a `Span` by name. *parent* is the name of the block that the row continues, if it is known."""

    start: int
    end: int
    names: list[BlockName]
    parent: BlockName | None


class Runs:
    """Which block each slot holds. For look-ups a hint beside the pool's index, which is by name.

    A dict answers with a cache miss or three for each name, 43 ns in a pool of 10,000 and 230 in one of a million.
    Names and slots of a run lie in a row: 11 and 14. A request that is named chunk by chunk makes one run.

    A slot's *spot* is its run and its place there in one number, so that the spots of a row of blocks are a row of
    numbers: they are written, compared and cleared by one call for all, which for a chunk of 32 blocks is what counts.
    """

    def __init__(self, num_slots: int) -> None:
        self.spots = array("q", [NO_SPOT]) * num_slots  # [slot]; what is not NO_SPOT is named. Written by `Runs` only
        self._all_spots = np.frombuffer(self.spots, np.int64) if num_slots else np.empty(0, np.int64)  # the same memory
        self._runs: dict[int, Run] = {}
        self._next = 0
        self._alone: dict[int, BlockName] = {}  # names of slots that are in no run
        self._next_alone = ALONE

    def add(
        self, before: int | None, names: Sequence[BlockName], start: int, slots: Sequence[int] | npt.NDArray[np.intp]
    ) -> None:
        """Note that these slots have got *names* from *start* on; slot *before* holds the block before them."""
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

    def add_alone(self, slot: int, name: BlockName) -> None:
        """Note that the slot has got that name, in no run."""
        self.spots[slot] = self._next_alone
        self._next_alone -= 1
        self._alone[slot] = name

    def remove(self, slots: npt.NDArray[np.intp]) -> list[BlockName]:
        """Forget the blocks in these slots; their names, run by run, blocks in no run last."""
        if not len(slots):
            return []
        spots = self._all_spots[slots]
        self._all_spots[slots] = NO_SPOT
        first, last = int(spots[-1]), int(spots[0])
        is_row = first >= 0 and last - first == len(spots) - 1
        if is_row and spots.tobytes() == np.arange(last, first - 1, -1).tobytes():  # a tail, as it is evicted
            return self._take_out(first >> PLACE_BITS, range(last & PLACES, (first & PLACES) - 1, -1))
        runs, names = spots >> PLACE_BITS, []
        for run_id in np.unique(runs[spots >= 0]).tolist():
            names += self._take_out(run_id, (spots[runs == run_id] & PLACES).tolist())
        return names + [self._alone.pop(slot) for slot in slots[spots <= ALONE].tolist()]

    def spans(self, slots: npt.NDArray[np.intp]) -> list[Span]:
        """The slots, which hold named blocks, cut into pieces that are one run's blocks in a row, the last block first,
        as a tail is evicted."""
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

    def rows(self, slots: npt.NDArray[np.intp]) -> list[Row]:
        """The same as rows, with the blocks' names."""
        rows = []
        for start, end, run_id, place in self.spans(slots) if len(slots) else ():
            if run_id == NO_SPOT:
                rows.append(Row(start, end, [self._alone[int(slots[start])]], None))
                continue
            before, run = place - (end - start), self._runs[run_id]
            names = self._names(run_id, range(place, before, -1))
            before += run.first
            rows.append(Row(start, end, names, None if before < 0 else run.names[before]))
        return rows

    def remove_spans(self, slots: npt.NDArray[np.intp], spans: Iterable[Span]) -> list[BlockName]:
        """Forget the blocks in these slots, which are the slots of the *spans*; the names of the blocks."""
        self._all_spots[slots] = NO_SPOT
        names: list[BlockName] = []
        num_gone: dict[int, int] = {}  # all of a run go at once: one that is half gone looks for the other half
        for start, end, run_id, place in spans:
            if run_id == NO_SPOT:
                names.append(self._alone.pop(int(slots[len(names)])))
            else:
                names += self._names(run_id, range(place, place - (end - start), -1))
                num_gone[run_id] = num_gone.get(run_id, 0) + end - start
        for run_id, num_slots in num_gone.items():
            self._shrink(run_id, num_slots)
        return names

    def name(self, slot: int) -> BlockName | None:
        """The name of the block in the slot."""
        spot = self.spots[slot]
        if spot < 0:
            return self._alone[slot] if spot <= ALONE else None
        run = self._runs[spot >> PLACE_BITS]
        return run.names[run.first + (spot & PLACES)]

    def parent(self, slot: int) -> BlockName | None:
        """The name of the block that the slot's block continues, if that is in a run and not a chain's first block."""
        spot = self.spots[slot]
        if spot < 0:
            return None
        run = self._runs[spot >> PLACE_BITS]
        before = run.first + (spot & PLACES) - 1
        return None if before < 0 else run.names[before]

    def following(self, slot: int, names: Sequence[BlockName], start: int) -> npt.NDArray[np.int32]:
        """The slots of *names* from *start* on, as far as they are in one run. *slot* holds the first."""
        spot = self.spots[slot]
        if spot < 0:
            return np.empty(0, np.int32)
        run, place = self._runs[spot >> PLACE_BITS], spot & PLACES
        limit = min(len(names) - start, len(run.slots) - place)
        there = run.first + place
        num_equal = 0
        while num_equal < limit:
            end = min(num_equal + PIECE, limit)
            ours, theirs = names[start + num_equal : start + end], run.names[there + num_equal : there + end]
            if ours != theirs:
                num_equal += next(i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
                break
            num_equal = end
        slots = np.frombuffer(run.slots[place : place + num_equal], np.int32)
        gone = self._all_spots[slots] != np.arange(spot, spot + num_equal)
        return slots[: int(gone.argmax())] if gone.any() else slots

    def check(self) -> None:
        """Raise AssertionError if runs and slots disagree."""
        for run_id, run in self._runs.items():
            slots = np.array(run.slots, np.int32)
            here = self._all_spots[slots] == (run_id << PLACE_BITS) + np.arange(len(slots))
            num_here = np.count_nonzero(self._all_spots >> PLACE_BITS == run_id)
            assert np.count_nonzero(here) == num_here, "a slot has no place in its run"
            assert num_here == run.num_left > 0, "a run's blocks were miscounted"
        in_runs = np.unique(self._all_spots[self._all_spots >= 0] >> PLACE_BITS).tolist()
        assert set(in_runs) == self._runs.keys(), "a slot is in a run that is no more"
        alone = set(np.flatnonzero(self._all_spots <= ALONE).tolist())
        assert alone == self._alone.keys(), "a name is kept for a slot without a block"

    def _take_out(self, run_id: int, places: Sequence[int]) -> list[BlockName]:
        """Take the blocks in these places, whose spots are cleared already, out of the run; their names."""
        names = self._names(run_id, places)
        self._shrink(run_id, len(places))
        return names

    def _names(self, run_id: int, places: Sequence[int]) -> list[BlockName]:
        """The names of the blocks in these places of the run. A range of places goes downwards."""
        run = self._runs[run_id]
        names, first = run.names, run.first
        if isinstance(places, range):
            end = first + places.stop
            return cast(list[BlockName], names[first + places.start : end if end >= 0 else None : -1])
        return [names[first + place] for place in places]

    def _shrink(self, run_id: int, num_slots: int) -> None:
        """Take *num_slots* blocks, whose spots are cleared already, off the run's count."""
        run = self._runs[run_id]
        run.num_left -= num_slots
        if run.num_left == 0:
            del self._runs[run_id]
        elif run.num_left < len(run.slots) // SHARE:
            left = np.array(run.slots, np.int32)
            end = int(np.flatnonzero(self._all_spots[left] >> PLACE_BITS == run_id)[-1]) + 1
            if end < len(run.slots) // 2:  # the tail is gone: so are its names
                begin = max(0, run.first - 1)  # with the parent's
                run.names = run.names[begin : run.first + end]
                run.first, run.slots = run.first - begin, run.slots[:end]


@dataclass(slots=True)
class Front:
    """The next slots to evict, looked through once for many evictions. *begin* is the place of the first one in the
    order, *spans* are their blocks in pieces of runs."""

    begin: int
    ids: Ids
    spans: list[Span]
    next_span: int = 0  # the spans before it are gone

    def take(self, start: int, end: int) -> list[Span]:
        """Remove the spans between these places, or parts of them; the removed ones."""
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
    """How far the entries that count have been moved together: those from place *read* on stand from *written* on, and
    between the two none counts."""

    read: int
    written: int


class EvictionOrder:
    """A queue of slots; the first is evicted next. A slot is in it once or not at all; a lent slot is in it and is
    passed over. Owned by its pool.

    An entry counts only if it is where `_places` says, and not before the queue's head. So leaving the order costs
    nothing, and chains of thousands of blocks come and go at numpy's speed, while single slots are array items, at the
    speed of a list's. When the entries that do not count are as many as the slots, a part of the others is moved
    towards the end with each call.
    """

    def __init__(self, num_slots: int, runs: Runs) -> None:
        """*runs* has the blocks of the slots in the order."""
        self.num_slots = 0  # in the order, the lent ones too
        self.num_lent = 0
        self.num_departures = 0  # of slots from the order, ever
        self._runs = runs
        self._places = array("i", [NO_PLACE]) * num_slots
        self._all_places = view_of(self._places)
        self._is_lent = np.zeros(num_slots, np.bool_)
        self._rows = GrowingRows(np.int32, 1)  # entries: slots by the time when they became free
        self._num_entries = 0
        self._before = 0  # places before the first entry
        self._num_recounted = 0  # places that were dropped when places were counted anew
        self._max_entries = 2 * num_slots + MANY  # more of them, and a sweep begins
        self._sweep: Sweep | None = None
        self._head = 0  # before it no entry counts
        self._front = Front(0, NOTHING, [])
        self._front_end = 0  # place up to which `_front` still holds, from the head on
        self._given = NOTHING  # the part of `_front` that `victims` gave last

    def append_few(self, slots: list[int]) -> None:
        """Put these slots, which are not in the order, at its end."""
        first, places = self._num_entries, self._places
        self._rows.grow(first + len(slots))
        items, place = self._rows.items, self._before + first
        for slot in slots:
            places[slot] = place
            items[place - self._before] = slot
            place += 1
        self._num_entries += len(slots)
        self.num_slots += len(slots)
        self._tidy(SWEPT * len(slots) + MANY)

    def append(self, ids: Ids) -> None:
        """The same for many slots at once."""
        self._all_places[ids] = np.arange(self._end, self._end + len(ids), dtype=np.int32)
        self._rows.grow(self._num_entries + len(ids))
        self._rows.all[self._num_entries : self._num_entries + len(ids)] = ids
        self._num_entries += len(ids)
        self.num_slots += len(ids)
        self._tidy(SWEPT * len(ids) + MANY)

    def remove_few(self, slots: list[int]) -> None:
        """Take the slots out of the order, if they are in it."""
        places, head = self._places, self._head
        for slot in slots:
            place = places[slot]
            if place >= head:
                if place < self._front_end:  # noqa: PLR1730  # min takes as long as the rest of this loop
                    self._front_end = place
                places[slot] = NO_PLACE
                self.num_slots -= 1
                self.num_departures += 1
                if self.num_lent and self._is_lent[slot]:
                    self._is_lent[slot] = False
                    self.num_lent -= 1

    def remove(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """The same for many slots at once; for each whether it was in the order."""
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
        """Pass over these slots of the order until `put_back`; they keep their places."""
        assert self.holds(ids).all(), "a slot is blank: there is nothing to copy"
        self._leave_front(ids)
        self._is_lent[ids] = True
        self.num_lent += len(ids)

    def put_back(self, ids: Ids) -> None:
        """These lent slots are passed over no more."""
        self._is_lent[ids] = False
        self.num_lent -= len(ids)

    def holds(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """For each of the slots whether it is in the order."""
        return self._all_places[ids] >= self._head

    def place(self, slot: int) -> int | None:
        """The slot's place in the order, the lowest is evicted first; None if it has none."""
        return self._places[slot] + self._num_recounted if self._places[slot] >= self._head else None

    def newest(self) -> int | None:
        """The slot that became free last; None if that one is not in the order any more."""
        if self._head >= self._end:
            return None
        slot = self._rows.items[self._num_entries - 1]
        return slot if self._places[slot] == self._end - 1 else None

    def victims(self, num_slots: int) -> Ids:
        """The next slots to evict, up to *num_slots*. They stay in the order until `take`."""
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
        """Take these slots, none of them lent, out of the order. Their blocks as spans if `victims` gave just these."""
        num_taken, spans = len(victims), None
        if victims is self._given and num_taken:
            start = self._head - self._front.begin
            self._given = NOTHING
            self._head += num_taken  # so that their entries count no more
            spans = self._front.take(start, start + num_taken)
        elif self._all_places[victims].tobytes() == _row_of_places(self._head, num_taken).tobytes():
            self._head += num_taken
        else:
            self._leave_front(victims)
            self._all_places[victims] = NO_PLACE
        self.num_slots -= num_taken
        self.num_departures += num_taken
        return spans

    def oldest(self, window: int) -> Ids:
        """The slots in the first *window* places of the order, without the lent ones among them."""
        found: list[Ids] = []
        missing, start = min(window, self.num_slots), self._head
        if self._end - start == self.num_slots:  # every entry from the head on counts
            return self._without_lent(self._entries(start, start + missing))
        while missing > 0:
            start = self._past_gap(start)
            piece = self._entries(start, start + missing + MANY)
            counts = self._count(piece, start)
            live = piece if counts.all() else piece[counts]
            if not found:  # entries before the first that counts are done with
                self._head = start + (int(counts.argmax()) if len(live) else len(piece))
            if len(live):
                found.append(live[:missing])
            missing, start = missing - len(live), start + len(piece)
        return self._without_lent(found[0] if len(found) == 1 else np.concatenate(found) if found else NOTHING)

    def part(self, start: int, limit: int) -> tuple[Ids, int | None]:
        """The slots that are not lent among *limit* entries from entry *start* on, and the entry after these, None at
        the end. An entry's number may be kept for a later call: entries only move to the end, where nothing comes
        between them, and the numbers go on when places are counted anew."""
        start = max(start - self._num_recounted, self._head)
        entries = self._entries(start, start + limit)
        live, end = entries[self._count(entries, start)], start + len(entries)
        return self._without_lent(live), end + self._num_recounted if end < self._end else None

    def check(self) -> None:
        """Raise AssertionError if the order's books disagree."""
        here = [slot for slot, place in enumerate(self._places) if place >= self._head]
        assert len(here) == self.num_slots, "the slots in the order were miscounted"
        assert all(self._rows.items[self._places[slot] - self._before] == slot for slot in here), (
            "a slot is not where its place says"
        )
        lent = np.flatnonzero(self._is_lent)
        assert len(lent) == self.num_lent, "the lent slots were miscounted"
        assert self.holds(lent).all(), "a slot that is not in the order is lent"

    @property
    def _end(self) -> int:
        """The place of the next slot that becomes free."""
        return self._before + self._num_entries

    def _entries(self, start: int, end: int) -> Ids:
        """The entries from place *start* to before *end*, as far as there are any."""
        start, end = start - self._before, end - self._before
        return cast(Ids, self._rows.all[start : min(end, self._num_entries)].astype(np.intp))

    def _count(self, entries: Ids, start: int) -> npt.NDArray[np.bool_]:
        """For each of the entries from place *start* on whether it counts."""
        counts: npt.NDArray[np.bool_] = self._all_places[entries] == _row_of_places(start, len(entries))
        return counts  # no cast: making that type takes 5 us

    def _without_lent(self, ids: Ids) -> Ids:
        return ids[~self._is_lent[ids]] if self.num_lent else ids

    def _look_ahead(self, num_slots: int) -> None:
        """Find the next slots to evict, for this eviction and many more."""
        self._head = self._past_gap(self._head)
        start, limit = self._head, min(max(FEW, LOOKED_AHEAD * num_slots), max(MAX_LOOKED_AT, num_slots))
        ids = self._entries(start, start + limit)
        others = self._all_places[ids] != _row_of_places(start, len(ids))
        if self.num_lent:
            others |= self._is_lent[ids]
        ids = ids[: int(others.argmax())] if others.any() else ids
        if len(ids):
            self._front = Front(start, ids, self._runs.spans(ids))
            self._front_end = start + len(ids)

    def _leave_front(self, ids: Ids) -> None:
        """Cut the front off before these slots of the order, which leave it or are lent."""
        if len(ids) and self._head < self._front_end:
            self._front_end = min(self._front_end, int(self._all_places[ids].min()))

    def _tidy(self, num_entries: int) -> None:
        """Go on with a sweep if there are many entries, and move the head past entries that do not count.

        *num_entries* are looked through at most."""
        if self._num_entries > self._max_entries:
            self._sweep_some(num_entries)
        if self._head < self._end and self._places[self._rows.items[self._head - self._before]] != self._head:
            start = self._past_gap(self._head)
            entries = self._entries(start, start + num_entries)
            counts = self._count(entries, start)
            self._head = start + (int(counts.argmax()) if counts.any() else len(entries))

    def _sweep_some(self, num_entries: int) -> None:
        """Move the entries that count, of the next *num_entries*, towards the end; after the last one drop the gap."""
        sweep = self._sweep
        if sweep is None:
            self._recount()
            sweep = self._sweep = Sweep(self._end, self._end)
        start = max(self._head, sweep.read - num_entries)
        if start < sweep.read:
            entries = self._entries(start, sweep.read)
            live = entries[self._count(entries, start)]
            self._front_end = min(self._front_end, start)
            end, sweep.read, sweep.written = sweep.written, start, sweep.written - len(live)
            self._all_places[live] = _row_of_places(sweep.written, len(live))
            self._rows.all[sweep.written - self._before : end - self._before] = live
        else:
            self._head = max(self._head, sweep.written)
            self._num_entries = self._end - self._head
            self._rows.drop(self._head - self._before, self._num_entries)
            self._before = self._head
            self._sweep = None

    def _past_gap(self, place: int) -> int:
        """The place, or the end of the gap that a sweep has left there."""
        sweep = self._sweep
        return place if sweep is None or not sweep.read <= place < sweep.written else sweep.written

    def _recount(self) -> None:
        """Count places from 0 again, long before they are too large for their arrays."""
        if self._before > MAX_PLACES:
            np.maximum(self._all_places - self._before, NO_PLACE, out=self._all_places)
            self._head -= self._before
            self._num_recounted += self._before
            self._before = self._front_end = 0


def _row_of_places(start: int, num_places: int) -> npt.NDArray[np.int32]:
    return np.arange(start, start + num_places, dtype=np.int32)
