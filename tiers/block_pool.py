"""BlockPool: the slots of one tier and one group, their reference counts, and the free list that is the LRU list."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from kvtier.tiers.block_hash import BlockName


class BlockPool:
    """A lazy LRU over *num_slots* slots. A slot is leased or free, never both; touched by the owner's thread only.

    A free slot either has no name (blank: reused first, last in first out) or still holds a named block, which stays
    findable until someone needs the slot (cached: evicted oldest first). Release a chain's tail first, and what is
    cached stays prefix-closed. A name is held by one slot at most.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._leases = [0] * num_slots
        self._names: list[BlockName | None] = [None] * num_slots
        self._slots: dict[BlockName, int] = {}
        self._blank = list(range(num_slots - 1, -1, -1))
        # OrderedDict: half the code of a linked list of ints at about its speed (facts in DESIGN.md section 10).
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._lent: set[int] = set()  # leased to a spill, but still in their place among the cached

    @property
    def num_free(self) -> int:
        """Slots that `allocate` could give now, evicting if it must."""
        return len(self._blank) + len(self._cached) - len(self._lent)

    @property
    def num_blank(self) -> int:
        """Slots that `allocate` could give without evicting."""
        return len(self._blank)

    @property
    def num_named(self) -> int:
        """Blocks that can be found here."""
        return len(self._slots)

    @property
    def num_leases(self) -> int:
        """All leases on all slots."""
        return sum(self._leases)

    def find(self, name: BlockName) -> int | None:
        """The slot that holds the block, or None. Changes nothing."""
        return self._slots.get(name)

    def name(self, slot: int) -> BlockName | None:
        """The name of the block in the slot, or None if nobody can find it."""
        return self._names[slot]

    def is_free(self, slot: int) -> bool:
        """Whether nobody leases the slot."""
        return self._leases[slot] == 0

    def allocate(self, num_slots: int) -> list[int] | None:
        """Lease that many slots, blank ones first, then the oldest cached ones, which lose their names.

        None, and nothing changed, if fewer are free.
        """
        if num_slots > self.num_free:
            return None
        missing = num_slots - len(self._blank)
        if missing > 0:
            self.evict(self.victims(missing))
        cut = len(self._blank) - num_slots
        slots = self._blank[cut:]
        del self._blank[cut:]
        slots.reverse()
        leases = self._leases
        for slot in slots:
            leases[slot] = 1
        return slots

    def lease(self, slots: Iterable[int]) -> None:
        """Add a lease to each slot; cached ones leave the free list. Only for slots that hold a block."""
        for slot in slots:
            if self._leases[slot] == 0:
                del self._cached[slot]
            elif slot in self._lent:
                self._lent.discard(slot)
                del self._cached[slot]
            self._leases[slot] += 1

    def release(self, slots: Iterable[int]) -> None:
        """End one lease of each slot; the first of them to become free will be the first evicted."""
        for slot in slots:
            leases = self._leases[slot] - 1
            assert leases >= 0, f"slot {slot} is not leased"
            self._leases[slot] = leases
            if leases:
                continue
            if self._names[slot] is None:
                self._blank.append(slot)
            else:
                self._cached[slot] = None

    def lend(self, slots: Iterable[int]) -> None:
        """Lease the slots to a copy: cached ones keep their place in the order, and nobody is given them meanwhile."""
        for slot in slots:
            if self._leases[slot] == 0:
                assert slot in self._cached, f"slot {slot} is blank: there is nothing to copy"
                self._lent.add(slot)
            self._leases[slot] += 1

    def put_back(self, slots: Iterable[int]) -> None:
        """The copy is over. A slot that somebody used meanwhile is treated like a released one."""
        for slot in slots:
            if slot not in self._lent:
                self.release([slot])
                continue
            self._leases[slot] -= 1
            if self._leases[slot] == 0:
                self._lent.discard(slot)

    def commit(self, slot: int, name: BlockName) -> bool:
        """Give the leased slot's block its name, so that it can be found; False if another slot has that name."""
        assert self._leases[slot] > 0, f"slot {slot} is free: only a leased slot's bytes are anyone's to name"
        assert self._names[slot] is None, f"slot {slot} has a name already"
        if name in self._slots:
            return False
        self._slots[name] = slot
        self._names[slot] = name
        return True

    def victims(self, num_slots: int) -> list[int]:
        """Up to that many cached slots, in the order in which they would be evicted. Changes nothing."""
        if not self._lent:
            return list(islice(self._cached, num_slots))
        return list(islice((slot for slot in self._cached if slot not in self._lent), num_slots))

    def oldest(self, window: int) -> list[int]:
        """The cached slots in the first *window* places of that order; lent ones keep their place but do not count."""
        return [slot for slot in islice(self._cached, window) if slot not in self._lent]

    def evict(self, slots: Iterable[int]) -> None:
        """Forget the blocks in the slots. Free ones become blank; leased ones do when their last lease ends."""
        for slot in slots:
            name = self._names[slot]
            if name is None:
                continue
            self._names[slot] = None
            del self._slots[name]
            if slot in self._lent:
                self._lent.discard(slot)
                del self._cached[slot]
            elif self._leases[slot] == 0:
                del self._cached[slot]
                self._blank.append(slot)

    def cached_slots(self) -> list[int]:
        """All slots that are free and hold a block, oldest first."""
        return self.victims(self.num_slots)

    def check(self) -> None:
        """Raise AssertionError if the pool's books disagree."""
        blank, cached = set(self._blank), set(self._cached)
        assert len(blank) == len(self._blank), "a slot is blank twice"
        assert not blank & cached, "a slot is blank and cached"
        assert all(leases >= 0 for leases in self._leases), "a slot was released more often than leased"
        free = {slot for slot in range(self.num_slots) if self._leases[slot] == 0}
        assert self._lent <= cached - free, "a lent slot has no place in the order, or no lease"
        assert free == blank | (cached - self._lent), "a slot is leased and free, or neither"
        named = {slot for slot in range(self.num_slots) if self._names[slot] is not None}
        assert not blank & named, "a blank slot has a name"
        assert cached <= named, "a cached slot has no name"
        assert {self._slots[name] for name in self._slots} == named, "names and slots disagree"
        assert all(self._names[slot] == name for name, slot in self._slots.items()), "a name points to another's slot"
