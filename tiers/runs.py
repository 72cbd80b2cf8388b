"""Runs: chains of blocks that were named together, so that a later prompt's look-up is one comparison and not thousands."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.tiers.block_hash import BlockName

NO_RUN = -1
PIECE = 256  # names compared at once


@dataclass(slots=True)
class Run:
    """Blocks of one chain in a row. *names* may go on behind them: it is the chain's own list, which only grows."""

    names: Sequence[BlockName]
    slots: npt.NDArray[np.int32]
    num_left: int  # of its blocks that are still where they were


class Runs:
    """A hint beside a pool's index, never a second truth: a slot is in a run only as long as it holds that block.

    A dict answers with a cache miss or three for each name, 43 ns in a pool of 10,000 and 227 in one of a million. Names
    and slots of a run lie in a row: 11 and 14.
    """

    def __init__(self, num_slots: int) -> None:
        self._runs: dict[int, Run] = {}
        self._next = 0
        self._run_of = np.full(num_slots, NO_RUN, np.int32)
        self._places = np.zeros(num_slots, np.int32)  # of slots in a run: where in it

    def add(self, names: Sequence[BlockName], slots: npt.NDArray[np.int32]) -> None:
        """These slots have just got these names."""
        self._runs[self._next] = Run(names, slots.copy(), len(slots))
        self._run_of[slots] = self._next
        self._places[slots] = np.arange(len(slots), dtype=np.int32)
        self._next = (self._next + 1) % (1 << 31)

    def remove(self, slots: npt.NDArray[np.int32]) -> None:
        """The slots no longer hold what they held."""
        runs = self._run_of[slots]
        if (runs == runs[0]).all():
            self._shrink(int(runs[0]), len(runs))
        else:
            for run_id, count in zip(*np.unique(runs, return_counts=True), strict=True):
                self._shrink(int(run_id), int(count))
        self._run_of[slots] = NO_RUN

    def following(self, slot: int, names: Sequence[BlockName], start: int) -> npt.NDArray[np.int32]:
        """The slots of as many of *names* from *start* on as are in one run from *slot* on, which holds the first."""
        run_id = int(self._run_of[slot])
        if run_id == NO_RUN:
            return np.empty(0, np.int32)
        run, place = self._runs[run_id], int(self._places[slot])
        most = min(len(names) - start, len(run.slots) - place)
        num_equal = 0
        while num_equal < most:
            end = min(num_equal + PIECE, most)
            ours, theirs = names[start + num_equal : start + end], run.names[place + num_equal : place + end]
            if ours != theirs:
                num_equal += next(i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
                break
            num_equal = end
        slots = run.slots[place : place + num_equal]
        gone = self._run_of[slots] != run_id
        return slots[: int(gone.argmax())] if gone.any() else slots

    def check(self) -> None:
        """Raise AssertionError if runs and slots disagree."""
        for run_id, run in self._runs.items():
            places = np.flatnonzero(self._run_of[run.slots] == run_id)
            assert len(places) == run.num_left > 0, "a run's blocks were miscounted"
            assert (self._places[run.slots[places]] == places).all(), "a slot has another place in its run"

    def holds(self, slot: int, name: BlockName) -> bool:
        """Whether the slot is in no run, or in one where it has that name. For checks."""
        run_id = int(self._run_of[slot])
        return run_id == NO_RUN or self._runs[run_id].names[self._places[slot]] == name

    def _shrink(self, run_id: int, num_blocks: int) -> None:
        if run_id != NO_RUN:
            run = self._runs[run_id]
            run.num_left -= num_blocks
            if run.num_left == 0:
                del self._runs[run_id]
