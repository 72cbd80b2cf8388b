"""SlotIndex: which slot holds the block of a name."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import itemgetter
from typing import cast

from kvtier.tiers.naming.block_hash import BlockName

NAME_BYTES = 32
MOST_IN_ONE = 3 << 13  # slots of a pool whose names are in one dict: it is made anew in a millisecond
MOST_IN_ROW = 1 << 13  # names in each dict of a larger pool
NUM_BYTES = 256  # values of a name's first byte

Slots = dict[BlockName, int]


class SlotIndex:
    """The slot of each name, in one dict for a small pool, in many by the name's first byte for a large one.

    A dict in which names come and go is made anew once as many were taken out of it as are in it: 0.1 s with a
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
        """Number of names in the fullest dict, which is made anew as a whole."""
        return max(map(len, self._dicts))

    def get(self, name: BlockName) -> int | None:
        """The slot of the name, or None; None for an empty name."""
        return self._by_byte[name[0]].get(name) if name else None

    def get_all(self, names: Sequence[BlockName], absent: int) -> list[int]:
        """The slot of each name, *absent* for names without one."""
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
        """Give the name this slot, unless it has one already; the slot that it has now."""
        return self._by_byte[name[0]].setdefault(name, slot)

    def give_all(self, names: Sequence[BlockName], slots: Iterable[int]) -> list[int]:
        """The same for many."""
        if self._one is not None:
            return list(map(self._one.setdefault, names, slots))
        return list(map(dict.setdefault, self._dicts_of(names), names, slots))

    def remove_all(self, names: Sequence[BlockName]) -> None:
        """Take the names, which all have slots, out of the index."""
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
