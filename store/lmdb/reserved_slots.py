"""`ReservedSlots`: the slots that puts write to before a change of the index gives them to records."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from kvtier.store.lmdb.tables import Tables
from kvtier.store.slab import Slot

if TYPE_CHECKING:
    import lmdb


class ReservedSlot(NamedTuple):
    """A slot that one put may write to.

    *freed_by* is the number of the change that freed it. It is None if the index says that the slot takes no disk
    space: a hole (a free slot whose disk space was released), or a slot beyond the end of its slab.
    """

    slot: Slot
    freed_by: int | None


def new_bytes(slots: Iterable[ReservedSlot]) -> int:
    """Return how much disk space is allocated when payloads are written to *slots*."""
    return sum([slot.num_bytes for slot, freed_by in slots if freed_by is None])


class ReservedSlots:
    """The reserved slots of all puts in progress. Only a thread with the writer's lock may use them.

    A reservation lives in memory only. In the index its slot stays what it is: free, a hole, or beyond the end of its
    slab. So if the process ends at any point, the only thing to undo is to release the disk space that was written to
    holes or beyond the end of a slab.

    *new_bytes* is the size of those reserved slots that take no disk space according to the index.
    """

    def __init__(self) -> None:
        self._slots: set[Slot] = set()
        self.new_bytes = 0

    def __contains__(self, slot: object) -> bool:
        return slot in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def find(
        self, tables: Tables, txn: "lmdb.Transaction[bytes]", num_bytes: int, num_slots: int, usable_before: int
    ) -> list[ReservedSlot]:
        """Return *num_slots* slots of *num_bytes* that no record and no put has. They are not reserved yet.

        Free slots come first, but only those freed by changes up to and including number *usable_before*. Then come
        holes, then new slots at the end of the slab.
        """
        found: list[ReservedSlot] = []
        for change, numbers in tables.free_numbers(txn, num_bytes, usable_before):
            slots = (slot for number in numbers if (slot := Slot(num_bytes, number)) not in self._slots)
            found += [ReservedSlot(slot, change) for slot in islice(slots, num_slots - len(found))]
            if len(found) == num_slots:
                return found
        new = islice(self._new(tables, txn, num_bytes), num_slots - len(found))
        return found + [ReservedSlot(slot, None) for slot in new]

    def add(self, slots: Sequence[ReservedSlot]) -> None:
        """Reserve *slots*, which `find` has returned."""
        self._slots.update([slot for slot, _ in slots])
        self.new_bytes += new_bytes(slots)

    def drop(self, slots: Sequence[ReservedSlot]) -> list[ReservedSlot]:
        """End the reservation of *slots*. Return those of them that were still reserved."""
        there = self._slots.intersection([slot for slot, _ in slots])
        dropped = list(slots) if len(there) == len(slots) else [each for each in slots if each.slot in there]
        self._slots -= there
        self.new_bytes -= new_bytes(dropped)
        return dropped

    def _new(self, tables: Tables, txn: "lmdb.Transaction[bytes]", num_bytes: int) -> Iterator[Slot]:
        for slot in tables.hole_slots(txn, num_bytes):
            if slot not in self._slots:
                yield slot
        number = tables.num_slots(txn).get(num_bytes, 0)
        while True:
            slot = Slot(num_bytes, number)
            if slot not in self._slots:
                yield slot
            number += 1
