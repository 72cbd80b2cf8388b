"""Presence: which blocks a remote store has said that it has, lately."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.lower.name_set import NameSet, rows_of
from kvtier.tiers.naming.block_hash import BlockName

LASTS_S = 60.0  # for which an answer is believed, up to twice as long
MAX_NAMES = 1 << 18  # of answers believed in one period; some 18 MiB
ABSENT_LASTS_S = 10.0  # for which it is believed that nothing is there
MAX_ABSENT = 1 << 14


class Presence:
    """Answers of a store that others write and empty too. A hint: what is here may be gone, and what is not here may
    be there.

    Names that are there are kept in two periods, of which the older is dropped as a whole. Of a prefix that is not
    there only its first block is noted as absent: what continues it is not asked for either. Owned by the tiers'
    thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._present: defaultdict[int, NameSet] = defaultdict(NameSet)
        self._earlier: defaultdict[int, NameSet] = defaultdict(NameSet)
        self._began_at = clock()
        self._absent: OrderedDict[tuple[int, BlockName], float] = OrderedDict()  # and until when

    @property
    def num_blocks(self) -> int:
        """Blocks that are believed to be there."""
        return sum(map(len, [*self._present.values(), *self._earlier.values()]))

    def are_held(self, group_id: int, names: Sequence[BlockName]) -> npt.NDArray[np.bool_]:
        """For each of *names* whether it is believed to be there."""
        held = np.zeros(len(names), np.bool_)
        if not names or not (group_id in self._present or group_id in self._earlier):
            return held
        rows = rows_of(names)
        for period in (self._present, self._earlier):
            if group_id in period:
                held |= period[group_id].holds(rows)
        return held

    def num_held(self, group_id: int, names: Sequence[BlockName]) -> int:
        """How many of *names* come before one that is not believed to be there."""
        if not self.are_held(group_id, names[:1]).any():  # the usual case: a prompt that was never seen
            return 0
        held = self.are_held(group_id, names)
        return len(names) if held.all() else int(held.argmin())

    def find_any(self, besides: Container[tuple[int, BlockName]]) -> tuple[int, BlockName] | None:
        """Group and name of some block that is believed to be there, none of *besides*; None if it found none."""
        periods = [*self._present.items(), *self._earlier.items()]
        blocks = ((group_id, name) for group_id, names in periods for name in names.find())
        return next((block for block in blocks if block not in besides), None)

    def add(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Note that these blocks are there."""
        self._turn()
        if names:
            self._present[group_id].add(rows_of(names))
            for name in names if self._absent else ():
                self._absent.pop((group_id, name), None)

    def remove(self, group_id: int, name: BlockName) -> None:
        """Note that this block is not there, or not to be had."""
        for period in (self._present, self._earlier):
            if group_id in period:
                period[group_id].discard(name)

    def note_absent(self, group_id: int, name: BlockName) -> None:
        """Note that the store said that it has not this block."""
        self.remove(group_id, name)
        self._absent[group_id, name] = self._clock() + ABSENT_LASTS_S
        self._absent.move_to_end((group_id, name))
        if len(self._absent) > MAX_ABSENT:
            self._absent.popitem(last=False)

    def is_absent(self, group_id: int, name: BlockName) -> bool:
        """Whether the store said lately that it has not this block."""
        return self._absent.get((group_id, name), float("-inf")) > self._clock()

    def clear(self) -> None:
        """Believe nothing any more."""
        self._present.clear()
        self._earlier.clear()
        self._absent.clear()

    def _turn(self) -> None:
        """Begin a new period if this one is over, or full."""
        num_names = sum(map(len, self._present.values()))
        if self._clock() - self._began_at > LASTS_S or num_names > MAX_NAMES:
            self._earlier, self._present = self._present, defaultdict(NameSet)
            self._began_at = self._clock()
