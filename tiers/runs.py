"""Runs: blocks of one chain in a row, whose names are kept, looked up and forgotten together."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.tiers.block_hash import BlockName

NO_RUN = -1
PIECE = 256  # names compared at once
SHARE = 4  # a run with less than this part of its blocks left lets the names of its tail go


@dataclass(slots=True)
class Run:
    """Block *first* of a chain and those after it. *names* is the chain's list of all its names, which only grows."""

    names: Sequence[BlockName]
    first: int
    slots: "array[int]"
    num_left: int = 0  # of its blocks that are still where they were


class Runs:
    """Which slot holds which block, seen from the slot; for look-ups a hint beside the pool's index.

    A dict answers with a cache miss or three for each name, 43 ns in a pool of 10,000 and 230 in one of a million.
    Names and slots of a run lie in a row: 11 and 14. A request that is named chunk by chunk makes one run.
    """

    def __init__(self, num_slots: int) -> None:
        self._runs: dict[int, Run] = {}
        self._next = 0
        self._run_of = np.full(num_slots, NO_RUN, np.int32)
        self._places = np.zeros(num_slots, np.int32)  # of slots in a run: where in it

    def add(
        self, before: int | None, names: Sequence[BlockName], start: int, slots: Sequence[int] | npt.NDArray[np.int32]
    ) -> None:
        """These slots have just got the names from *start* on; *before* holds the one before them."""
        run_id = NO_RUN if before is None else int(self._run_of[before])
        run = self._runs.get(run_id)
        if run is None or run.names is not names or run.first + len(run.slots) != start:
            run_id, self._next = self._next, (self._next + 1) % (1 << 31)
            run = self._runs[run_id] = Run(names, start, array("i"))
        place = len(run.slots)
        run.num_left += len(slots)
        self._run_of[slots] = run_id
        if isinstance(slots, np.ndarray):
            run.slots.frombytes(slots.tobytes())
            self._places[slots] = np.arange(place, len(run.slots), dtype=np.int32)
        else:
            run.slots.extend(slots)
            self._places[slots] = range(place, len(run.slots))

    def remove(self, slots: npt.NDArray[np.int32]) -> list[BlockName]:
        """The slots no longer hold what they held; the names of the blocks in runs, run by run."""
        runs = self._run_of[slots]
        self._run_of[slots] = NO_RUN
        if (runs == runs[0]).all():
            return self._shrink(int(runs[0]), self._places[slots])
        names = []
        for run_id in np.unique(runs).tolist():
            names += self._shrink(run_id, self._places[slots[runs == run_id]])
        return names

    def name(self, slot: int) -> BlockName | None:
        """The name of the block in the slot, if it is in a run."""
        run = self._runs.get(int(self._run_of[slot]))
        return None if run is None else run.names[run.first + int(self._places[slot])]

    def parent(self, slot: int) -> BlockName | None:
        """The name before that of the block in the slot, if it is in a run and not a chain's first."""
        run = self._runs.get(int(self._run_of[slot]))
        before = -1 if run is None else run.first + int(self._places[slot]) - 1
        return None if run is None or before < 0 else run.names[before]

    def following(self, slot: int, names: Sequence[BlockName], start: int) -> npt.NDArray[np.int32]:
        """The slots of as many of *names* from *start* on as are in one run from *slot* on, which holds the first."""
        run_id = int(self._run_of[slot])
        if run_id == NO_RUN:
            return np.empty(0, np.int32)
        run, place = self._runs[run_id], int(self._places[slot])
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
        gone = (self._run_of[slots] != run_id) | (self._places[slots] != np.arange(place, place + num_equal))
        return slots[: int(gone.argmax())] if gone.any() else slots

    def check(self) -> None:
        """Raise AssertionError if runs and slots disagree."""
        for run_id, run in self._runs.items():
            slots = np.array(run.slots, np.int32)
            places = np.arange(len(slots))
            here = (self._run_of[slots] == run_id) & (self._places[slots] == places)
            assert np.count_nonzero(here) == np.count_nonzero(self._run_of == run_id), "a slot has no place in its run"
            assert np.count_nonzero(here) == run.num_left > 0, "a run's blocks were miscounted"

    def _shrink(self, run_id: int, places: npt.NDArray[np.int32]) -> list[BlockName]:
        """Take the blocks in these places out of the run; their names."""
        if run_id == NO_RUN:
            return []
        run = self._runs[run_id]
        run.num_left -= len(places)
        if run.num_left == 0:
            del self._runs[run_id]
        elif run.num_left < len(run.slots) // SHARE:
            left = np.array(run.slots, np.int32)
            end = int(np.flatnonzero(self._run_of[left] == run_id)[-1]) + 1
            if end < len(run.slots) // 2:  # the tail is gone: so are its names
                begin = max(0, run.first - 1)  # with the parent's
                names, run.names = run.names, run.names[begin : run.first + end]
                first, run.first, run.slots = run.first, run.first - begin, run.slots[:end]
                return [names[first + place] for place in places.tolist()]
        first, last = run.first + int(places[-1]), run.first + int(places[0])
        if last - first == len(places) - 1 and (np.diff(places) == -1).all():  # a tail, as it is evicted
            return list(run.names[first : last + 1])[::-1]
        return [run.names[run.first + place] for place in places.tolist()]
