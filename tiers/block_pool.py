"""BlockPool: the slots of one tier and one group, their reference counts, and the free list that is the LRU list."""

from array import array
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvtier.tiers.block_hash import BlockName
from kvtier.tiers.runs import NO_SPOT, Runs

Slots = Sequence[int] | npt.NDArray[np.int32]  # distinct slots
ABSENT = -1  # in place of a slot: the block is not here
NOTHING = np.empty(0, np.int32)
NOWHERE = -1  # a place that is not in the order
FEW = 16
MANY = 128  # slots; from about here on numpy calls beat a loop over ints (measured)


class BlockPool:
    """A lazy LRU over *num_slots* slots. A slot is leased or free, never both; touched by the owner's thread only.

    A free slot either has no name (blank: reused first, last in first out) or still holds a named block, which stays
    findable until someone needs the slot (cached: evicted oldest first). Release a chain's tail first, and what is
    cached stays prefix-closed. A name is held by one slot at most.

    The order is a queue to which a slot is appended whenever it becomes free; an entry counts only if it is where
    `_places` says, and not before the queue's head. So leaving the order costs nothing, and chains of thousands of
    blocks come and go at numpy's speed, while single slots are array items, at the speed of a list's.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_changes = 0  # of which block is where; what was found stays true while this stays the same
        self._slots: dict[BlockName, int] = {}
        self._runs = Runs(num_slots)
        self._spots = self._runs.spots
        self._leases = array("i", bytes(4 * num_slots))
        self._places = array("i", [NOWHERE]) * num_slots
        self._all_leases = _view(self._leases)  # the same memory, for many at once
        self._all_places = _view(self._places)
        self._all_spots = np.frombuffer(self._spots, np.int64) if num_slots else np.empty(0, np.int64)
        self._order = array("i")  # slots by the time they became free; places are positions in it
        self._most_entries = 2 * num_slots + MANY  # of the order, before those that do not count are left out
        self._head = 0  # before it no entry counts
        self._front = NOTHING  # what `oldest` gave last, if that is the very front of the order
        self._num_ordered = 0  # cached slots, and lent ones: leased to a spill, but still in their place
        self._num_lent = 0
        self.num_reserved = 0  # free slots that are spoken for
        self._copies: dict[int, int] = {}  # slot -> how many of its leases are copies
        self._blank = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that `allocate` could give now, evicting if it must. Less than none while copies down lease what is
        reserved."""
        return len(self._blank) + self._num_ordered - self._num_lent - self.num_reserved

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
        return int(self._all_leases.sum())

    def parent(self, slot: int) -> BlockName | None:
        """The name of the block that the slot's block continues, as far as it is known."""
        return self._runs.parent(slot)

    def find(self, name: BlockName) -> int | None:
        """The slot that holds the block, or None. Changes nothing."""
        return self._slots.get(name)

    def find_all(self, names: Sequence[BlockName]) -> npt.NDArray[np.int32]:
        """The slots that hold the blocks, ABSENT for those not here. Changes nothing."""
        found: list[npt.NDArray[np.int32]] = []
        start = 0
        while len(names) - start >= MANY:
            slot = self._slots.get(names[start])
            following = NOTHING if slot is None else self._runs.following(slot, names, start)
            if not len(following):
                break
            found.append(following)
            start += len(following)
        if start < len(names):
            found.append(self._one_by_one(names[start:] if start else names))
        return found[0] if len(found) == 1 else np.concatenate([NOTHING, *found])

    def name(self, slot: int) -> BlockName | None:
        """The name of the block in the slot, or None if nobody can find it."""
        return self._runs.name(slot)

    def are_named(self, slots: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """For each of the slots whether it holds a block that can be found."""
        return cast(npt.NDArray[np.bool_], self._all_spots[slots] != NO_SPOT)

    def is_free(self, slot: int) -> bool:
        """Whether nobody leases the slot."""
        return self._leases[slot] == 0

    def num_leased(self, slots: npt.NDArray[np.int32]) -> int:
        """How many of the slots somebody leases."""
        return int(np.count_nonzero(self._all_leases[slots]))

    def allocate(self, num_slots: int) -> list[int] | None:
        """Lease that many slots, blank ones first, then the oldest cached ones, which lose their names.

        None, and nothing changed, if fewer are free.
        """
        blank, leases = self._blank, self._leases
        if self.num_reserved and num_slots > self.num_free:
            return None
        if num_slots == 1 and blank:
            slot = blank.pop()
            leases[slot] = 1
            return [slot]
        cut = len(blank) - num_slots
        if cut < 0:
            return None if num_slots > self.num_free else self.evict_for(num_slots, self.victims(-cut))[0]
        slots = blank[cut:]
        del blank[cut:]
        slots.reverse()
        if num_slots < MANY:
            for slot in slots:
                leases[slot] = 1
        else:
            self._all_leases[slots] = 1
        return slots

    def reserve(self, num_slots: int) -> None:
        """Keep so many of the free slots, whichever, for who ends the reservation and takes them."""
        self.num_reserved += num_slots

    def unreserve(self, num_slots: int) -> None:
        """So many are no longer kept."""
        self.num_reserved -= num_slots

    def lease(self, slots: Slots) -> None:
        """Add a lease to each slot; cached ones leave the free list. Only for slots that hold a block."""
        if len(slots) < MANY:
            leases, places, head, any_lent = self._leases, self._places, self._head, self._num_lent
            for slot in slots:
                count = leases[slot]
                if count == 0 or any_lent:  # else it has no place
                    if places[slot] >= head:
                        places[slot] = NOWHERE
                        self._num_ordered -= 1
                        self._num_lent -= count > 0
                    else:
                        assert count, f"slot {slot} is blank: there is nothing to lease it for"
                leases[slot] = count + 1
            return
        ids = _ids(slots)
        ordered = self._all_places[ids] >= self._head
        assert (ordered | (self._all_leases[ids] > 0)).all(), "a slot is blank: there is nothing to lease it for"
        self._num_ordered -= int(np.count_nonzero(ordered))
        if self._num_lent:
            self._num_lent -= int(np.count_nonzero(self._all_leases[ids[ordered]]))
        self._all_places[ids] = NOWHERE
        self._all_leases[ids] += 1

    def release(self, slots: Slots) -> None:
        """End one lease of each slot; the first of them to become free will be the first evicted."""
        if len(slots) < MANY:
            leases, spots, copies, blank = self._leases, self._spots, self._copies, self._blank
            for slot in slots if type(slots) is list else _ints(slots):
                left = leases[slot] - 1
                if left:
                    assert left > 0, f"slot {slot} is not leased"
                    leases[slot] = left
                    if not (copies and left == copies.get(slot)):
                        continue
                else:
                    leases[slot] = 0
                if spots[slot] != NO_SPOT:
                    if len(self._order) >= self._most_entries:
                        self._renumber()
                    self._places[slot] = len(self._order)
                    self._order.append(slot)
                    self._num_ordered += 1
                    self._num_lent += left > 0
                elif not left:
                    blank.append(slot)
        else:
            ids = _ids(slots)
            counts = self._all_leases[ids] - 1
            assert counts.min() >= 0, "a slot is not leased"
            self._all_leases[ids] = counts
            if counts.any():
                ids = self._let_go(ids, counts)
            is_named = self._all_spots[ids] != NO_SPOT
            if not is_named.all():
                self._blank += ids[~is_named].tolist()
                ids = ids[is_named]
            if len(self._order) + len(ids) > self._most_entries:
                self._renumber()
            self._all_places[ids] = np.arange(len(self._order), len(self._order) + len(ids), dtype=np.int32)
            self._order.frombytes(ids.tobytes())
            self._num_ordered += len(ids)

    def refresh(self, slots: Slots) -> None:
        """Make the cached ones among these blocks the most recent, the first of them still being evicted first."""
        self.lease(slots)
        self.release(slots)

    def lend(self, slots: Slots) -> None:
        """Lease the slots to a copy: cached ones keep their place in the order, and nobody is given them meanwhile.

        One that somebody leases too gets its place when those leases end, whether the copy is over or not.
        """
        for slot in _ints(slots):
            if self._leases[slot] == 0:
                assert self._places[slot] >= self._head, f"slot {slot} is blank: there is nothing to copy"
                self._num_lent += 1
            self._leases[slot] += 1
            self._copies[slot] = self._copies.get(slot, 0) + 1

    def put_back(self, slots: Slots) -> None:
        """The copy is over."""
        for slot in _ints(slots):
            assert self._copies.get(slot), f"slot {slot} is not lent"
            self._copies[slot] -= 1
            if not self._copies[slot]:
                del self._copies[slot]
            self._leases[slot] -= 1
            if not self._leases[slot]:
                if self._places[slot] < self._head:  # forgotten meanwhile
                    self._blank.append(slot)
                else:
                    self._num_lent -= 1

    def commit(self, slots: Slots, names: Sequence[BlockName], start: int = 0) -> list[int]:
        """Name the blocks in the leased slots, so that they can be found: by *names* from *start* on.

        Give the list of all names of a chain, which may only grow: blocks of one list in a row are found fastest. Where
        another slot has a name already, the one given stays without; the result are their places in *slots*.
        """
        if len(slots) == 1:
            return self._commit_one(int(slots[0]), names, start)
        wanted, ids = _ints(slots), _ids(slots)
        all_names, names = names, names[start : start + len(wanted)] if len(wanted) < len(names) else names
        holders = list(map(self._slots.setdefault, names, wanted))
        self.num_changes += 1
        if holders == wanted:
            before = self._slots.get(all_names[start - 1]) if start else None
            self._runs.add(before, all_names, start, ids)
            return []
        taken = []
        for place, (slot, holder, name) in enumerate(zip(wanted, holders, names, strict=True)):
            if slot == holder:
                self._runs.add_alone(slot, name)
            else:
                taken.append(place)
        return taken

    def victims(self, num_slots: int) -> npt.NDArray[np.int32]:
        """Up to that many cached slots, in the order in which they would be evicted. Changes nothing."""
        if num_slots < FEW and not self._num_lent:
            return np.array(self._few_oldest(num_slots), np.int32)
        oldest = self.oldest(num_slots + self._num_lent)  # lent ones are left out of it
        return oldest if len(oldest) <= num_slots else oldest[:num_slots]

    def oldest(self, window: int) -> npt.NDArray[np.int32]:
        """The cached slots in the first *window* places of that order; lent ones keep their place but do not count."""
        found: list[npt.NDArray[np.int32]] = []
        missing, start = min(window, self._num_ordered), self._head
        if len(self._order) - start == self._num_ordered:  # every entry from the head on counts
            first = self._entries(start, start + missing)
            if self._num_lent:
                return cast(npt.NDArray[np.int32], first[self._all_leases[first] == 0])
            self._front = first
            return first
        while missing > 0:
            piece = self._entries(start, start + missing + MANY)
            counts = self._all_places[piece] == np.arange(start, start + len(piece), dtype=np.int32)
            live = piece if counts.all() else piece[counts]
            if not found:  # entries before the first that counts are done with
                self._head = start + (int(counts.argmax()) if len(live) else len(piece))
            if len(live):
                found.append(live[:missing])
            missing, start = missing - len(live), start + len(piece)
        slots = found[0] if len(found) == 1 else np.concatenate(found) if found else np.empty(0, np.int32)
        return cast(npt.NDArray[np.int32], slots[self._all_leases[slots] == 0]) if self._num_lent else slots

    def ordered(self, start: int, most: int) -> tuple[npt.NDArray[np.int32], int | None]:
        """The cached slots, oldest first, among *most* entries of the order from its entry *start* on, and the entry
        after these, None at the end. Entries only move to the front, when the order is renumbered."""
        start = max(start, self._head)
        entries = self._entries(start, start + most)
        is_cached = self._all_places[entries] == np.arange(start, start + len(entries), dtype=np.int32)
        end = start + len(entries)
        return entries[is_cached & (self._all_leases[entries] == 0)], end if end < len(self._order) else None

    def evict(self, slots: Slots) -> list[BlockName]:
        """Forget the blocks in the slots; their names, without those that had none.

        Free slots become blank, the last to be reused among the blank ones and in the order given; leased ones do when
        their last lease ends.
        """
        named = _ids(slots)
        named = named[self._all_spots[named] != NO_SPOT]
        names = self._forget(named)
        freed = named[self._all_leases[named] == 0]
        self._blank[:0] = freed[::-1].tolist()
        return names

    def evict_for(self, num_slots: int, victims: npt.NDArray[np.int32]) -> tuple[list[int], list[BlockName]]:
        """Lease all blank slots and after them these cached ones, *num_slots* together; also the names these lose."""
        evicted = cast(list[int], victims.tolist())
        slots = self._blank[::-1] + evicted
        assert len(slots) == num_slots, "as many victims as blank slots are missing"
        end = self._head + len(evicted)
        if (
            victims is self._front
            or self._all_places[victims].tobytes() == np.arange(self._head, end, dtype=np.int32).tobytes()
        ):
            self._head = end  # which takes all of them out of the order
        else:
            self._all_places[victims] = NOWHERE
        names = self._unname(victims)
        self._num_ordered -= len(evicted)
        self._all_leases[victims] = 1
        if self._blank:
            self._all_leases[self._blank] = 1
            self._blank.clear()
        return slots, names

    def cached_slots(self) -> list[int]:
        """All slots that are free and hold a block, oldest first."""
        return cast(list[int], self.victims(self.num_slots).tolist())

    def place(self, slot: int) -> int | None:
        """Where in the order of eviction a cached or lent slot stands, lower first; None for others."""
        return self._places[slot] if self._places[slot] >= self._head else None

    def check(self) -> None:
        """Raise AssertionError if the pool's books disagree."""
        assert (self._all_leases >= 0).all(), "a slot was released more often than leased"
        assert self.num_reserved >= 0, "a reservation was ended twice"
        blank = set(self._blank)
        assert len(blank) == len(self._blank), "a slot is blank twice"
        ordered = {slot for slot in range(self.num_slots) if self._places[slot] >= self._head}
        assert not blank & ordered, "a slot is blank and cached"
        assert len(ordered) == self._num_ordered, "the slots in the order were miscounted"
        assert all(self._order[self._places[slot]] == slot for slot in ordered), "a slot is not where its place says"
        free = {slot for slot in range(self.num_slots) if self._leases[slot] == 0}
        lent = ordered - free
        assert len(lent) == self._num_lent, "the lent slots were miscounted"
        assert free == blank | (ordered - lent), "a slot is leased and free, or neither"
        assert all(self._leases[slot] == self._copies[slot] for slot in lent), "a lent slot is leased by others too"
        assert all(0 < count <= self._leases[slot] for slot, count in self._copies.items()), "a copy has no lease"
        named = {slot for slot in range(self.num_slots) if self._spots[slot] != NO_SPOT}
        assert not blank & named, "a blank slot has a name"
        assert ordered <= named, "a cached slot has no name"
        assert set(self._slots.values()) == named, "names and slots disagree"
        self._runs.check()
        assert all(self.name(slot) == name for name, slot in self._slots.items()), "a name points to another's slot"

    def _commit_one(self, slot: int, names: Sequence[BlockName], start: int) -> list[int]:
        assert self._leases[slot], "only a leased slot's bytes are anyone's to name"
        assert self._spots[slot] == NO_SPOT, "a slot has a name already"
        name = names[start]
        if self._slots.setdefault(name, slot) != slot:
            return [0]
        self.num_changes += 1
        if len(names) == 1:
            self._runs.add_alone(slot, name)
        else:
            self._runs.add(self._slots.get(names[start - 1]) if start else None, names, start, [slot])
        return []

    def _let_go(self, ids: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Those of the slots, with so many leases left, that nobody but copies leases; they get their place now."""
        if not self._copies:
            return cast(npt.NDArray[np.int32], ids[counts == 0])
        copies = np.array([self._copies.get(slot, 0) for slot in ids.tolist()], np.int32)
        is_lent = (counts > 0) & (counts == copies)
        is_named = self._all_spots[ids] != NO_SPOT
        self._num_lent += int(np.count_nonzero(is_lent & is_named))
        return cast(npt.NDArray[np.int32], ids[(counts == 0) | (is_lent & is_named)])

    def _one_by_one(self, names: Sequence[BlockName]) -> npt.NDArray[np.int32]:
        if len(names) > 1:
            try:
                return np.array(itemgetter(*names)(self._slots), np.int32)  # half the time, if all are here
            except KeyError:
                pass
        return np.array([self._slots.get(name, ABSENT) for name in names], np.int32)

    def _forget(self, ids: npt.NDArray[np.int32]) -> list[BlockName]:
        """Take the named slots out of index and order; their names."""
        if not len(ids):
            return []
        ordered = ids[self._all_places[ids] >= self._head]
        self._num_ordered -= len(ordered)
        if self._num_lent:
            self._num_lent -= int(np.count_nonzero(self._all_leases[ordered]))
        self._all_places[ids] = NOWHERE
        return self._unname(ids)

    def _unname(self, ids: npt.NDArray[np.int32]) -> list[BlockName]:
        """Take the named slots out of the index; their names."""
        names = self._runs.remove(ids)
        index = self._slots
        for name in names:
            del index[name]
        self.num_changes += 1
        return names

    def _entries(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """The entries of the order from *start* to before *end*, as far as there are any."""
        return np.frombuffer(self._order[start:end], np.int32) if start < min(end, len(self._order)) else NOTHING

    def _few_oldest(self, num_slots: int) -> list[int]:
        """The same as `oldest`, one by one."""
        order, places, found = self._order, self._places, list[int]()
        position, end = self._head, len(order)
        while position < end and len(found) < num_slots:
            slot = order[position]
            if places[slot] == position:
                found.append(slot)
            elif not found:
                self._head = position + 1
            position += 1
            if position > self._head + MANY:  # many entries that do not count
                return cast(list[int], self.oldest(num_slots).tolist())
        return found

    def _renumber(self) -> None:
        """Leave out the entries that do not count: now and then, when they are as many as the slots."""
        entries = np.frombuffer(self._order[self._head :], np.int32)
        live = entries[self._all_places[entries] == np.arange(self._head, len(self._order), dtype=np.int32)]
        self._all_places.fill(NOWHERE)
        self._all_places[live] = np.arange(len(live), dtype=np.int32)
        self._order = array("i", live.tobytes())
        self._head = 0


def _view(numbers: "array[int]") -> npt.NDArray[np.int32]:
    return np.frombuffer(numbers, np.int32) if numbers else np.empty(0, np.int32)


def _ids(slots: Slots) -> npt.NDArray[np.int32]:
    if isinstance(slots, array):
        return _view(slots)
    return np.asarray(slots, np.int32)


def _ints(slots: Slots) -> list[int]:
    if isinstance(slots, list):
        return slots
    return cast(list[int], slots.tolist()) if isinstance(slots, (np.ndarray, array)) else list(slots)
