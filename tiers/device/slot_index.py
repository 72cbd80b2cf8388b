"""SlotIndex: which slot holds the block of a name."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import itemgetter
from typing import cast

from kvtier.tiers.naming.block_hash import BlockName

NAME_BYTES = 32
MOST_IN_ONE = 3 << 13  # slots whose names are one dict: it is made anew in a millisecond
MOST_IN_ROW = 1 << 13  # of more slots than that
NUM_BYTES = 256  # that a name may begin with

Slots = dict[BlockName, int]


class SlotIndex:
    """One dict in a small pool; in a large one as many as are needed to keep each small, by a name's first byte.

    A dict in which names come and go is made anew once what was taken out of it is as much as is in it: 0.1 s with a
    million names. The choice of the dict costs 0.1 to 0.2 µs a name, in large pools only.
    """

    def __init__(self, num_slots: int) -> None:
        num_dicts = 1
        while num_slots > MOST_IN_ONE and num_slots > num_dicts * MOST_IN_ROW and num_dicts < NUM_BYTES:
            num_dicts *= 2
        self._dicts: list[Slots] = [{} for _ in range(num_dicts)]
        self._by_byte = self._dicts * (NUM_BYTES // num_dicts)
        self._one = self._dicts[0] if num_dicts == 1 else None

    def __len__(self) -> int:
        return sum(map(len, self._dicts))

    def items(self) -> Iterator[tuple[BlockName, int]]:
        """All names and their slots."""
        for some in self._dicts:
            yield from some.items()

    @property
    def most_in_one(self) -> int:
        """Names in the fullest dict, which is made anew as a whole."""
        return max(map(len, self._dicts))

    def get(self, name: BlockName) -> int | None:
        """The slot of the name, or None; for an empty one too."""
        return self._by_byte[name[0]].get(name) if name else None

    def get_all(self, names: Sequence[BlockName], absent: int) -> list[int]:
        """The slots of the names, *absent* for those that have none."""
        if self._one is None:
            return list(map(dict.get, self._dicts_of(names), names, repeat(absent)))
        if len(names) > 1:
            try:
                return list(itemgetter(*names)(self._one))  # half the time, if all are here
            except KeyError:
                pass
        return list(map(self._one.get, names, repeat(absent)))

    def has_none(self, names: Sequence[BlockName]) -> bool:
        """Whether none of the names has a slot."""
        if self._one is not None:
            return self._one.keys().isdisjoint(names)
        return not any(map(dict.__contains__, self._dicts_of(names), names))

    def give(self, name: BlockName, slot: int) -> int:
        """The slot of the name: this one, unless it has another already."""
        return self._by_byte[name[0]].setdefault(name, slot)

    def give_all(self, names: Sequence[BlockName], slots: Iterable[int]) -> list[int]:
        """The same for many."""
        if self._one is not None:
            return list(map(self._one.setdefault, names, slots))
        return list(map(dict.setdefault, self._dicts_of(names), names, slots))

    def remove_all(self, names: Sequence[BlockName]) -> None:
        """These names have no slots any more."""
        if self._one is not None:
            index = self._one
            for name in names:
                del index[name]
            return
        for index, name in zip(self._dicts_of(names), names, strict=True):
            del index[name]

    def _dicts_of(self, names: Sequence[BlockName]) -> Sequence[Slots]:
        if len(names) < 2:
            return [self._by_byte[name[0]] for name in names]
        joined = b"".join(names)  # a third of the time of asking each for its first byte
        is_regular = len(joined) == NAME_BYTES * len(names)
        firsts = joined[::NAME_BYTES] if is_regular else bytes(name[0] for name in names)
        return cast(Sequence[Slots], itemgetter(*firsts)(self._by_byte))
