"""The names of the blocks on disk, kept in memory so that no lookup waits for the disk."""

from collections import defaultdict, deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.tiers.lower.name_set import NameSet, Rows, names_of, rows_of
from kvtier.tiers.naming.block_hash import BlockName

# Up to this many names, lookups one by one are faster than one vectorised lookup (measured: both take about 10 µs).
FEW_LOOKUPS = 12
FEW_NEW = 48  # the same for names to be added (measured)
BUCKETS_AT_ONCE = 64  # buckets whose names one call of `pop_forgotten` returns: about 220 names
TOLD_AT_ONCE = 256  # buckets whose names make up one page of `pages`: about 900 names


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Names of one attention group that the index had before it was emptied."""

    group_id: int
    names: list[BlockName]
    are_lost: bool  # True if the blocks were evicted, False if the index is only loaded again
    is_event: bool  # whether events must report their removal


@dataclass(slots=True)
class _Past:
    """Names of one group that `DiskIndex` had before it was emptied, and whose memory is still to be freed."""

    group_id: int
    names: NameSet
    pages: Iterator[list[BlockName]]
    are_lost: bool = False
    is_event: bool = False


class DiskIndex:
    """The names of the blocks on disk, by attention group. Takes about 70 bytes per block.

    The owner reports every write and eviction. The names of blocks that were on disk before the index was created are
    loaded in pages, newest first, so that the blocks most likely to be requested are known early. A block that is not
    known yet counts as not on disk. The duration of a call does not depend on the number of names in the index.
    """

    def __init__(self) -> None:
        self.is_loaded = False
        self._names: defaultdict[int, NameSet] = defaultdict(NameSet)
        # While loading: names that were removed but may still be in a page that was read earlier.
        self._gone: defaultdict[int, NameSet] = defaultdict(NameSet)
        # Names from before the index was last emptied, which are still to be returned by `pop_forgotten`.
        self._past: deque[_Past] = deque()

    @property
    def num_blocks(self) -> int:
        """Number of blocks known to be on disk."""
        return sum(map(len, self._names.values()))

    def num_blocks_of(self, group_id: int) -> int:
        """Return the number of blocks of one group that are known to be on disk."""
        return len(self._names[group_id]) if group_id in self._names else 0

    def holds(self, group_id: int, name: BlockName) -> bool:
        """Return whether the block is on disk."""
        return group_id in self._names and name in self._names[group_id]

    def num_held(self, group_id: int, names: Sequence[BlockName]) -> int:
        """Return how many of *names* come before the first that is not on disk."""
        held = self._names.get(group_id)
        if held is None:
            return 0
        if len(names) <= FEW_LOOKUPS:
            return next((i for i, name in enumerate(names) if name not in held), len(names))
        is_held = held.holds(rows_of(names))
        return len(names) if is_held.all() else int(is_held.argmin())

    def are_held(self, group_id: int, names: Sequence[BlockName]) -> npt.NDArray[np.bool_]:
        """Return for each of *names* whether the block is on disk."""
        held = self._names.get(group_id)
        if held is None:
            return np.zeros(len(names), np.bool_)
        if len(names) <= FEW_LOOKUPS:
            return np.array([name in held for name in names], np.bool_)
        return held.holds(rows_of(names))

    def find_any(self, besides: Container[tuple[int, BlockName]]) -> tuple[int, BlockName] | None:
        """Return group and name of a block on disk that is not in *besides*.

        Each call searches only the next part of the index, and returns None if that part has no such block.
        """
        blocks = ((group_id, name) for group_id, names in self._names.items() for name in names.find())
        return next((block for block in blocks if block not in besides), None)

    def load(self, group_id: int, rows: Rows) -> list[BlockName]:
        """Add a page of names that was read from the store, and return the names that are new.

        Blocks that have been removed from the disk since the page was read are left out.
        """
        gone = self._gone.get(group_id)
        if gone is not None:
            rows = rows[~gone.holds(rows)]
        return names_of(rows[self._names[group_id].add(rows)])

    def finish_loading(self) -> None:
        """Mark the index as completely loaded. From now on, a block that is not in the index is not on disk."""
        self.is_loaded = True
        self._drop_gone()

    def add(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Add the names of blocks that have been written."""
        held = self._names[group_id]
        if len(names) <= FEW_NEW:
            for name in names:
                held.add_one(name)
        else:
            held.add(rows_of(names))
        gone = self._gone.get(group_id)
        if gone is not None:
            for name in names:
                gone.discard(name)

    def remove(self, group_id: int, name: BlockName) -> bool:
        """Remove a block that is no longer on disk, and return whether it was in the index."""
        if not self.is_loaded:
            self._gone[group_id].add_one(name)
        return group_id in self._names and self._names[group_id].discard(name)

    def begin_again(self) -> None:
        """Empty the index, so that it can be loaded again from the first page.

        From now on, `pop_forgotten` returns the names that the index had.
        """
        self._empty(are_lost=False, is_event=True)
        self.is_loaded = False

    def pages(self, group_id: int) -> Iterator[list[BlockName]]:
        """Yield the group's names in pages of a few hundred.

        Names may be added and removed meanwhile. The pages contain at least the names that are in the index from the
        first page to the last. If the index is emptied, no further page follows.
        """
        names = self._names.get(group_id)
        pages = iter(()) if names is None else names.pages(TOLD_AT_ONCE)
        while names is not None and self._names.get(group_id) is names:
            page = next(pages, None)
            if page is None:
                return
            yield page

    def empty(self, *, is_event: bool = True) -> None:
        """Empty the index, because its blocks were evicted. The index then counts as loaded.

        `pop_forgotten` returns the names that it had. *is_event* says whether events must report each of them.
        """
        self._empty(are_lost=True, is_event=is_event)
        self.is_loaded = True

    @property
    def is_forgetting(self) -> bool:
        """True if `pop_forgotten` still has names to return or memory to free."""
        return bool(self._past)

    def pop_forgotten(self) -> Forgotten | None:
        """Return some names that `begin_again()` or `empty()` has dropped; None if none are left.

        Once all names of a group have been returned, further calls return no names and free the names' memory in parts.
        Freeing 600 MB at once would take 30 ms.
        """
        if not self._past:
            return None
        past = self._past[0]
        page = next(past.pages, None)
        if page is None and not past.names.give_back():
            self._past.popleft()
        return Forgotten(past.group_id, page or [], past.are_lost, past.is_event)

    def _empty(self, *, are_lost: bool, is_event: bool) -> None:
        for group_id, names in self._names.items():
            self._past.append(_Past(group_id, names, names.pages(BUCKETS_AT_ONCE), are_lost, is_event))
        self._names.clear()
        self._drop_gone()

    def _drop_gone(self) -> None:
        # No pages, so that `pop_forgotten` frees the memory without returning the names.
        self._past.extend(_Past(group_id, some, iter(())) for group_id, some in self._gone.items())
        self._gone.clear()
