"""Hints of which blocks a remote store has, from its recent answers."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.lower.name_set import NameSet, rows_of
from kvtier.tiers.naming.block_hash import BlockName

LASTS_S = 60.0  # length of a period; an answer is kept for one to two periods
MAX_NAMES = 1 << 18  # names after which a period ends early; they take about 18 MiB
ABSENT_LASTS_S = 10.0  # how long an answer that a block is absent is kept
MAX_ABSENT = 1 << 14  # maximum number of answers of this kind that are kept


class RemoteHints:
    """Hints of which blocks a remote store has, from the store's recent answers.

    Other machines write to the store and evict from it. So a block that is listed here may be gone, and one that is not
    listed may exist.

    The names of present blocks are kept in two sets, one for the current period and one for the previous period. When a
    period ends, the older set is dropped. Of the absent blocks of a prefix only the first one is recorded, because the
    store is not asked about the blocks after it. Owned by the tiers' thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._present: defaultdict[int, NameSet] = defaultdict(NameSet)  # of the current period, by attention group
        self._earlier: defaultdict[int, NameSet] = defaultdict(NameSet)  # of the previous period
        self._began_at = clock()  # start of the current period
        self._absent: OrderedDict[tuple[int, BlockName], float] = OrderedDict()  # with the time when each expires

    @property
    def num_blocks(self) -> int:
        """Number of blocks believed to be in the store."""
        return sum(map(len, [*self._present.values(), *self._earlier.values()]))

    def are_held(self, group_id: int, names: Sequence[BlockName]) -> npt.NDArray[np.bool_]:
        """Return for each of *names* whether the block is believed to be in the store."""
        held = np.zeros(len(names), np.bool_)
        if not names or not (group_id in self._present or group_id in self._earlier):
            return held
        rows = rows_of(names)
        for period in (self._present, self._earlier):
            if group_id in period:
                held |= period[group_id].holds(rows)
        return held

    def num_held(self, group_id: int, names: Sequence[BlockName]) -> int:
        """Return how many leading blocks of *names* are believed to be in the store."""
        if not self.are_held(group_id, names[:1]).any():  # the usual case: a prompt that was never stored
            return 0
        held = self.are_held(group_id, names)
        return len(names) if held.all() else int(held.argmin())

    def find_any(self, besides: Container[tuple[int, BlockName]]) -> tuple[int, BlockName] | None:
        """Return group and name of any block believed to be in the store, except *besides*; None if none is found."""
        periods = [*self._present.items(), *self._earlier.items()]
        blocks = ((group_id, name) for group_id, names in periods for name in names.find())
        return next((block for block in blocks if block not in besides), None)

    def add(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Record that these blocks are in the store."""
        self._turn()
        if names:
            self._present[group_id].add(rows_of(names))
            for name in names if self._absent else ():
                self._absent.pop((group_id, name), None)

    def remove(self, group_id: int, name: BlockName) -> None:
        """Record that this block is not in the store, or cannot be read."""
        for period in (self._present, self._earlier):
            if group_id in period:
                period[group_id].discard(name)

    def note_absent(self, group_id: int, name: BlockName) -> None:
        """Record the store's answer that it does not have this block."""
        self.remove(group_id, name)
        self._absent[group_id, name] = self._clock() + ABSENT_LASTS_S
        self._absent.move_to_end((group_id, name))
        if len(self._absent) > MAX_ABSENT:
            self._absent.popitem(last=False)

    def is_absent(self, group_id: int, name: BlockName) -> bool:
        """Return whether the store answered recently that it does not have this block."""
        return self._absent.get((group_id, name), float("-inf")) > self._clock()

    def clear(self) -> None:
        """Forget all of the store's answers, about present and absent blocks."""
        self._present.clear()
        self._earlier.clear()
        self._absent.clear()

    def _turn(self) -> None:
        """If the current set of names is older than `LASTS_S` or larger than `MAX_NAMES`, begin a new one.

        The previous set is dropped then, and the current one takes its place.
        """
        num_names = sum(map(len, self._present.values()))
        if self._clock() - self._began_at > LASTS_S or num_names > MAX_NAMES:
            self._earlier, self._present = self._present, defaultdict(NameSet)
            self._began_at = self._clock()
