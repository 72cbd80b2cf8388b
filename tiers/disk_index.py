"""DiskIndex: which blocks the disk has, known without asking it."""

from collections.abc import Container, Iterable, Sequence

from kvtier.tiers.block_hash import BlockName


class DiskIndex:
    """The names on disk, by group, in memory: no look-up waits for a disk. About 100 bytes a block.

    Its owner tells it of every write and eviction. What was there before it began is loaded in pages, newest first, so
    that what is most likely to be asked for is known at once; what is not known yet counts as not there.
    """

    def __init__(self) -> None:
        self.is_loaded = False
        self._names: dict[int, set[BlockName]] = {}
        self._gone: set[tuple[int, BlockName]] = set()  # while loading: a page read earlier may still name them

    @property
    def num_blocks(self) -> int:
        """Blocks known to be on disk."""
        return sum(map(len, self._names.values()))

    def holds(self, group_id: int, name: BlockName) -> bool:
        """Whether the block is on disk."""
        return name in self._names.get(group_id, ())

    def num_held(self, group_id: int, names: Sequence[BlockName]) -> int:
        """How many of *names* come before one that is not on disk."""
        held = self._names.get(group_id, set())
        if held.issuperset(names):
            return len(names)
        return next(i for i, name in enumerate(names) if name not in held)

    def names(self, group_id: int) -> list[BlockName]:
        """The names of a group that are known to be on disk."""
        return list(self._names.get(group_id, ()))

    def find_any(self, besides: Container[tuple[int, BlockName]]) -> tuple[int, BlockName] | None:
        """Group and name of some block on disk that is none of *besides*; None if there is none."""
        blocks = ((group_id, name) for group_id, names in self._names.items() for name in names)
        return next((block for block in blocks if block not in besides), None)

    def load(self, group_id: int, names: Iterable[BlockName]) -> list[BlockName]:
        """These were on disk when the page was read; those of them that are new to the index."""
        held = self._names.setdefault(group_id, set())
        new = [name for name in names if name not in held and (group_id, name) not in self._gone]
        held.update(new)
        return new

    def loaded(self) -> None:
        """That was the last page."""
        self.is_loaded = True
        self._gone.clear()

    def add(self, group_id: int, names: Iterable[BlockName]) -> None:
        """These have been written."""
        self._names.setdefault(group_id, set()).update(names)
        if not self.is_loaded:
            self._gone.difference_update((group_id, name) for name in names)

    def remove(self, group_id: int, name: BlockName) -> bool:
        """The block has left the disk, or was found not to be there; whether it was known to be."""
        held = self._names.get(group_id, set())
        was_held = name in held
        held.discard(name)
        if not self.is_loaded:
            self._gone.add((group_id, name))
        return was_held

    def begin_again(self) -> None:
        """Nothing is known any more of what is on disk: it is loaded from the first page on."""
        self.clear()
        self.is_loaded = False

    def clear(self) -> None:
        """Nothing is on disk."""
        self._names.clear()
        self._gone.clear()
        self.is_loaded = True
