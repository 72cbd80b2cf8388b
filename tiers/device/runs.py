"""Runs: blocks of one chain in a row, and their names, which are kept, looked up and forgotten together."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvtier.tiers.naming.block_hash import BlockName

NO_SPOT = -1  # the spot of a slot without a named block
ALONE = -2  # this and lower ones are the spots of slots whose block has a name but is in no run
PLACE_BITS = 32
PLACES = (1 << PLACE_BITS) - 1
PIECE = 256  # names compared at once
SHARE = 4  # a run with less than this part of its blocks left forgets the names of its tail


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
        most = min(len(names) - start, len(run.slots) - place)
        there = run.first + place
        num_equal = 0
        while num_equal < most:
            end = min(num_equal + PIECE, most)
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
