"""DiskIndex: which blocks the disk has, known without asking it."""

from collections import defaultdict, deque
from collections.abc import Container, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.lower.name_set import NameSet, Rows, names_of, rows_of
from kvtier.tiers.naming.block_hash import BlockName

FEW = 48  # names; up to here one by one is faster than all at once (measured)
BUCKETS_AT_ONCE = 64  # names of so many are forgotten in a call: some 220


class DiskIndex:
    """The names on disk, by group, in memory: no look-up waits for a disk. About 70 bytes a block.

    Its owner tells it of every write and eviction. What was there before it began is loaded in pages, newest first, so
    that what is most likely to be asked for is known at once; what is not known yet counts as not there. No call takes
    longer for there being more names.
    """

    def __init__(self) -> None:
        self.is_loaded = False
        self._names: defaultdict[int, NameSet] = defaultdict(NameSet)
        self._gone: defaultdict[int, NameSet] = defaultdict(
            NameSet
        )  # while loading: a page read earlier may still name them
        self._past: deque[tuple[int, NameSet, Iterator[list[BlockName]]]] = deque()  # what is not known any more

    @property
    def num_blocks(self) -> int:
        """Blocks known to be on disk."""
        return sum(map(len, self._names.values()))

    def holds(self, group_id: int, name: BlockName) -> bool:
        """Whether the block is on disk."""
        return group_id in self._names and name in self._names[group_id]

    def num_held(self, group_id: int, names: Sequence[BlockName]) -> int:
        """How many of *names* come before one that is not on disk."""
        held = self._names.get(group_id)
        if held is None:
            return 0
        if len(names) <= FEW:
            return next((i for i, name in enumerate(names) if name not in held), len(names))
        is_held = held.holds(rows_of(names))
        return len(names) if is_held.all() else int(is_held.argmin())

    def are_held(self, group_id: int, names: Sequence[BlockName]) -> npt.NDArray[np.bool_]:
        """For each of *names* whether it is on disk."""
        held = self._names.get(group_id)
        return np.zeros(len(names), np.bool_) if held is None or not names else held.holds(rows_of(names))

    def find_any(self, besides: Container[tuple[int, BlockName]]) -> tuple[int, BlockName] | None:
        """Group and name of some block on disk that is none of *besides*; None if none was found, by this call."""
        blocks = ((group_id, name) for group_id, names in self._names.items() for name in names.find())
        return next((block for block in blocks if block not in besides), None)

    def load(self, group_id: int, rows: Rows) -> list[BlockName]:
        """These were on disk when the page was read; those of them that are new to the index."""
        gone = self._gone.get(group_id)
        if gone is not None:
            rows = rows[~gone.holds(rows)]
        return names_of(rows[self._names[group_id].add(rows)])

    def finish_loading(self) -> None:
        """That was the last page."""
        self.is_loaded = True
        self._let_go(self._gone)

    def add(self, group_id: int, names: Sequence[BlockName]) -> None:
        """These have been written."""
        held = self._names[group_id]
        if len(names) <= FEW:
            for name in names:
                held.add_one(name)
        else:
            held.add(rows_of(names))
        gone = self._gone.get(group_id)
        if gone is not None:
            for name in names:
                gone.discard(name)

    def remove(self, group_id: int, name: BlockName) -> bool:
        """The block has left the disk, or was found not to be there; whether it was known to be."""
        if not self.is_loaded:
            self._gone[group_id].add_one(name)
        return group_id in self._names and self._names[group_id].discard(name)

    def begin_again(self) -> None:
        """Nothing is known any more of what is on disk: it is loaded from the first page on. `forget_some` tells what
        was known."""
        for group_id, names in self._names.items():
            self._past.append((group_id, names, names.pages(BUCKETS_AT_ONCE)))
        self._names.clear()
        self._let_go(self._gone)
        self.is_loaded = False

    def clear(self) -> None:
        """Nothing is on disk."""
        self._let_go(self._names)
        self._let_go(self._gone)
        self._past = deque((group_id, names, iter(())) for group_id, names, _ in self._past)
        self.is_loaded = True

    def forget_some(self) -> tuple[int, list[BlockName]] | None:
        """A group and some of its names that were known before `begin_again`; None when all have been told.

        Gives their memory back, a part with each call: 600 MB at once are 30 ms.
        """
        if not self._past:
            return None
        group_id, names, pages = self._past[0]
        page = next(pages, None)
        if page is None and not names.give_back():
            self._past.popleft()
        return group_id, page or []

    def _let_go(self, names: dict[int, NameSet]) -> None:
        """Have `forget_some` give the memory of these back."""
        self._past.extend((group_id, some, iter(())) for group_id, some in names.items())
        names.clear()
