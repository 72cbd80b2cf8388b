"""DiskIndex: which blocks are on disk, kept in memory, so that no look-up waits for the disk."""

from collections import defaultdict, deque
from collections.abc import Container, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.lower.name_set import NameSet, Rows, names_of, rows_of
from kvtier.tiers.naming.block_hash import BlockName

FEW = 48  # names; up to here one by one is faster than all at once (measured)
BUCKETS_AT_ONCE = 64  # names of so many are forgotten in a call: some 220
TOLD_AT_ONCE = 256  # buckets whose names are a page: some 900


class DiskIndex:
    """The names of the blocks on disk, by group; about 70 bytes a block.

    Its owner tells it of every write and eviction. Blocks that were on disk before it began are loaded in pages, newest
    first, so that those most likely to be asked for are known at once; a block that is not known yet counts as not on
    disk. No call takes longer for there being more names.
    """

    def __init__(self) -> None:
        self.is_loaded = False
        self._names: defaultdict[int, NameSet] = defaultdict(NameSet)
        self._gone: defaultdict[int, NameSet] = defaultdict(
            NameSet
        )  # while loading: a page read earlier may still name them
        self._past: deque[tuple[int, NameSet, Iterator[list[BlockName]]]] = (
            deque()
        )  # names of openings before this one, to be told

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
        if held is None:
            return np.zeros(len(names), np.bool_)
        if len(names) <= FEW:
            return np.array([name in held for name in names], np.bool_)
        return held.holds(rows_of(names))

    def find_any(self, besides: Container[tuple[int, BlockName]]) -> tuple[int, BlockName] | None:
        """Group and name of some block on disk that is none of *besides*; None if this call found none."""
        blocks = ((group_id, name) for group_id, names in self._names.items() for name in names.find())
        return next((block for block in blocks if block not in besides), None)

    def load(self, group_id: int, rows: Rows) -> list[BlockName]:
        """Add one page of names that were on disk when it was read; those of them that are new to the index."""
        gone = self._gone.get(group_id)
        if gone is not None:
            rows = rows[~gone.holds(rows)]
        return names_of(rows[self._names[group_id].add(rows)])

    def finish_loading(self) -> None:
        """Note that the last page has been loaded: what is not known now is not on disk."""
        self.is_loaded = True
        self._let_go(self._gone)

    def add(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Add names of blocks that have been written."""
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
        """Remove a block that has left the disk or was found not to be there; whether it was in the index."""
        if not self.is_loaded:
            self._gone[group_id].add_one(name)
        return group_id in self._names and self._names[group_id].discard(name)

    def begin_again(self) -> None:
        """Empty the index, to be loaded from the first page on; `forget_some` hands over what was in it."""
        for group_id, names in self._names.items():
            self._past.append((group_id, names, names.pages(BUCKETS_AT_ONCE)))
        self._names.clear()
        self._let_go(self._gone)
        self.is_loaded = False

    def pages(self, group_id: int) -> Iterator[list[BlockName]]:
        """All names of the group that stay in the index until the last page, a few hundred at a time. Names may come
        and go meanwhile; if the index is emptied, there is no further page."""
        names = self._names.get(group_id)
        pages = iter(()) if names is None else names.pages(TOLD_AT_ONCE)
        while names is not None and self._names.get(group_id) is names:
            page = next(pages, None)
            if page is None:
                return
            yield page

    def empty(self) -> None:
        """As `clear`; `forget_some` hands over what was in it."""
        self.begin_again()
        self.is_loaded = True

    @property
    def is_forgetting(self) -> bool:
        """Whether `forget_some` has something left to do."""
        return bool(self._past)

    def clear(self) -> None:
        """Empty the index: nothing is on disk, and no page is to be loaded."""
        self._let_go(self._names)
        self._let_go(self._gone)
        self._past = deque((group_id, names, iter(())) for group_id, names, _ in self._past)
        self.is_loaded = True

    def forget_some(self) -> tuple[int, list[BlockName]] | None:
        """Hand over a group and some of its names that were known before `begin_again`; None when there are no more.

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
