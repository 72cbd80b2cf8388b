"""DirtyMarks: which slots of a pool hold a block that has no copy in a tier below."""

from collections import deque

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.slot_ids import NOTHING, Ids

MOST_ENTRIES = 4  # for each slot: when the queue is longer, its oldest pieces are queued anew
CLEAN = 0


class DirtyMarks:
    """A mark for each slot, and a queue of the marked slots, the one marked first first.

    A mark is the number of the piece of the queue that its slot is in, and counts only there. So taking a mark away
    costs no search; a slot that is not marked any more is left out when it comes to the queue's front.
    """

    def __init__(self, num_slots: int) -> None:
        self._marks = np.full(num_slots, CLEAN, np.int64)
        self._num_marked = 0
        self._pieces: deque[tuple[int, Ids]] = deque()
        self._num_entries = 0  # slots in all pieces, marked or not
        self._most_entries = MOST_ENTRIES * num_slots
        self._number = CLEAN  # of the newest piece

    def __len__(self) -> int:
        return self._num_marked

    def __contains__(self, slot: int) -> bool:
        return bool(self._marks[slot] != CLEAN)

    def among(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """For each of the slots whether it is marked."""
        marked: npt.NDArray[np.bool_] = self._marks[slots] != CLEAN
        return marked

    def any_among(self, slots: Ids) -> bool:
        """Whether one of the slots is marked."""
        return self._num_marked > 0 and bool(np.count_nonzero(self._marks[slots]))

    def add(self, slots: Ids) -> None:
        """Mark the slots that are not marked yet. The array is kept."""
        num_before = int(np.count_nonzero(self._marks[slots]))
        self._queue(slots[self._marks[slots] == CLEAN] if num_before else slots)
        self._num_marked += len(slots) - num_before
        to_look_through = 2 * len(slots)  # more than are added, so that the queue gets shorter
        while self._num_entries > self._most_entries and to_look_through > 0:
            number, oldest = self._pieces.popleft()
            self._num_entries -= len(oldest)
            to_look_through -= len(oldest)
            self._queue(oldest[self._marks[oldest] == number])

    def remove(self, slots: Ids) -> None:
        """Take the marks of these slots away."""
        if self._num_marked:
            self._num_marked -= int(np.count_nonzero(self._marks[slots]))
            self._marks[slots] = CLEAN

    def oldest(self, most: int) -> Ids:
        """Up to that many marked slots, in the order in which they were marked."""
        found: list[Ids] = []
        num_found = 0
        for number, piece in list(self._pieces) if most > 0 else ():
            left = piece[self._marks[piece] == number]
            if not len(left) and not num_found:
                self._pieces.popleft()
                self._num_entries -= len(piece)
            found.append(left)
            num_found += len(left)
            if num_found >= most:
                break
        return np.concatenate([NOTHING, *found])[:most]

    def clear(self) -> None:
        """Take all marks away."""
        self._marks.fill(CLEAN)
        self._num_marked = self._num_entries = 0
        self._pieces.clear()

    def check(self) -> None:
        """Raise AssertionError if marks and queue disagree."""
        assert self._num_marked == int(np.count_nonzero(self._marks)), "marks were miscounted"
        assert self._num_entries == sum(len(piece) for _, piece in self._pieces), "the queue's entries were miscounted"
        assert self._num_entries <= self._most_entries + 2 * len(self._marks), "the queue has grown too long"
        queued = [slot for number, piece in self._pieces for slot in piece[self._marks[piece] == number].tolist()]
        assert len(queued) == self._num_marked, "a marked slot is queued twice, or will never be found"

    def _queue(self, slots: Ids) -> None:
        self._number += 1
        self._marks[slots] = self._number
        if len(slots):
            self._pieces.append((self._number, slots))
            self._num_entries += len(slots)
