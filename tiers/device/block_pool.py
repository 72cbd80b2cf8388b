"""BlockPool: the slots of one tier and one group, their reference counts, and the free list that is the LRU list."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.growing_rows import GrowingRows
from kvtier.tiers.device.runs import NO_SPOT, Row, Runs, Span
from kvtier.tiers.device.slot_index import SlotIndex
from kvtier.tiers.naming.block_hash import BlockName

Ids = npt.NDArray[np.intp]  # slots as numpy indexes with; from any other integers it makes these each time, in 1.3 us
Slots = Sequence[int] | npt.NDArray[np.integer[Any]]  # distinct slots
ABSENT = -1  # in place of a slot: the block is not here
NOTHING = np.empty(0, np.intp)
NOWHERE = -1  # a place that is not in the order
FEW = 16
SWEPT = 2  # entries for each that is released: while the order is swept it grows by half of what it has
MOST_PLACES = 1 << 30
MANY = 128  # slots; from about here on numpy calls beat a loop over ints (measured)
LOOKED_AHEAD = 16  # times as many slots at the eviction end are looked at as are wanted now
MOST_LOOKED_AT = 1024


@dataclass(slots=True)
class Front:
    """Cached blocks at the eviction end, first one first, looked through once for many evictions. *begin* is the
    first one's place in the order."""

    begin: int
    ids: Ids
    spans: list[Span]
    next_span: int = 0  # those before it are gone

    def take(self, start: int, end: int) -> list[Span]:
        """The spans between these places, or parts of them; they are gone then."""
        taken = []
        while start < end:
            span = self.spans[self.next_span]
            if span.end > start:
                upto = min(span.end, end)
                taken.append(Span(start, upto, span.run_id, span.place - (start - span.start)))
                start = upto
            self.next_span += span.end <= end
        return taken


@dataclass(slots=True)
class Sweep:
    """How far the order's entries that count have been moved together: all from place *read* on are from *written* on;
    between the two none counts."""

    read: int
    written: int


class BlockPool:
    """A lazy LRU over *num_slots* slots. A slot is leased or free, never both; touched by the owner's thread only.

    A free slot either has no name (blank: reused first, last in first out) or still holds a named block, which stays
    findable until someone needs the slot (cached: evicted oldest first). Release a chain's tail first, and what is
    cached stays prefix-closed. A name is held by one slot at most.

    The order is a queue to which a slot is appended whenever it becomes free; an entry counts only if it is where
    `_places` says, and not before the queue's head. So leaving the order costs nothing, and chains of thousands of
    blocks come and go at numpy's speed, while single slots are array items, at the speed of a list's. When entries that
    do not count are as many as the slots, those that count are moved together to the end, a part with each release.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_changes = 0  # of which block is where; what was found stays true while this stays the same
        self._slots = SlotIndex(num_slots)
        self._runs = Runs(num_slots)
        self._spots = self._runs.spots
        self._leases = array("i", bytes(4 * num_slots))
        self._places = array("i", [NOWHERE]) * num_slots
        self._all_leases = _view(self._leases)  # the same memory, for many at once
        self._all_places = _view(self._places)
        self._all_spots = np.frombuffer(self._spots, np.int64) if num_slots else np.empty(0, np.int64)
        self._order = GrowingRows(np.int32, 1)  # slots by the time they became free; places are counted in it
        self._num_entries = 0  # of the order
        self._before = 0  # places before the order's first entry, which are in use no more
        self._most_entries = 2 * num_slots + MANY  # of the order, before those that do not count are left out
        self._sweep: Sweep | None = None
        self._head = 0  # before it no entry counts
        self._front = Front(0, NOTHING, [])
        self._front_end = 0  # place before which what `_front` says still holds; from the head on
        self._given = NOTHING  # what `victims` gave of it last
        self._num_ordered = 0  # cached slots, and lent ones: leased to a spill, but still in their place
        self._num_lent = 0
        self.num_reserved = 0  # free slots that are spoken for
        self._copies = array("i", bytes(4 * num_slots))  # how many of each slot's leases are copies
        self._all_copies = _view(self._copies)
        self._num_copies = 0  # all of them
        self.num_departures = 0  # of slots from the order
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
            if slot is None:
                break
            following = self._runs.following(slot, names, start)
            found.append(following)
            start += len(following)
            if start < FEW * len(found):  # the blocks have come one by one: so they are found
                break
        if start < len(names):
            rest = names[start:] if start else names
            if len(rest) >= MANY and self._slots.has_none(rest):  # as of a prompt that is in another tier
                found.append(np.full(len(rest), ABSENT, np.int32))
            else:
                found.append(np.array(self._slots.get_all(rest, ABSENT), np.int32))
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.int32), *found])

    def has_none(self, names: Sequence[BlockName]) -> bool:
        """Whether none of the blocks is here. Changes nothing."""
        return self._slots.has_none(names)

    def name(self, slot: int) -> BlockName | None:
        """The name of the block in the slot, or None if nobody can find it."""
        return self._runs.name(slot)

    def rows(self, slots: Ids) -> list[Row]:
        """What is in the slots, which hold named blocks: rows of blocks of one chain."""
        return self._runs.rows(slots)

    def are_named(self, slots: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """For each of the slots whether it holds a block that can be found."""
        return cast(npt.NDArray[np.bool_], self._all_spots[slots] != NO_SPOT)

    def spots(self, slots: Ids) -> npt.NDArray[np.int64]:
        """For each of the slots a number that stays the same while it holds the same named block, and no longer."""
        return self._all_spots[slots]

    def is_free(self, slot: int) -> bool:
        """Whether nobody leases the slot."""
        return self._leases[slot] == 0

    def num_leased(self, slots: npt.NDArray[np.integer[Any]]) -> int:
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

    def lease_blank(self, slots: Ids) -> None:
        """Lease these very slots, which are blank. Takes as long as there are blank slots."""
        wanted = np.zeros(self.num_slots, np.bool_)
        wanted[slots] = True
        blank = np.array(self._blank, np.intp)
        is_wanted = wanted[blank]
        assert int(np.count_nonzero(is_wanted)) == len(slots), "a slot is not blank"
        self._blank[:] = blank[~is_wanted].tolist()
        self._all_leases[slots] = 1

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
                    if (place := places[slot]) >= head:
                        self._front_end = min(self._front_end, place)
                        places[slot] = NOWHERE
                        self._num_ordered -= 1
                        self.num_departures += 1
                        self._num_lent -= count > 0
                    else:
                        assert count, f"slot {slot} is blank: there is nothing to lease it for"
                leases[slot] = count + 1
            return
        ids = _ids(slots)
        ordered = self._all_places[ids] >= self._head
        self._leave_front(ids[ordered])
        assert (ordered | (self._all_leases[ids] > 0)).all(), "a slot is blank: there is nothing to lease it for"
        num_ordered = int(np.count_nonzero(ordered))
        self._num_ordered -= num_ordered
        self.num_departures += num_ordered
        if self._num_lent:
            self._num_lent -= int(np.count_nonzero(self._all_leases[ids[ordered]]))
        self._all_places[ids] = NOWHERE
        self._all_leases[ids] += 1
        self._tidy(SWEPT * len(slots) + MANY)

    def release(self, slots: Slots) -> None:
        """End one lease of each slot; the first of them to become free will be the first evicted."""
        if len(slots) < MANY:
            leases, spots, blank = self._leases, self._spots, self._blank
            copies, num_before = self._copies if self._num_copies else None, self._num_entries
            for slot in slots if type(slots) is list else _ints(slots):
                left = leases[slot] - 1
                if left:
                    assert left > 0, f"slot {slot} is not leased"
                    leases[slot] = left
                    if copies is None or left != copies[slot]:
                        continue
                else:
                    leases[slot] = 0
                if spots[slot] != NO_SPOT:
                    if self._num_entries == num_before:
                        self._order.grow(num_before + len(slots))
                    self._places[slot] = self._before + self._num_entries
                    self._order.items[self._num_entries] = slot
                    self._num_entries += 1
                    self._num_ordered += 1
                    self._num_lent += left > 0
                elif not left:
                    blank.append(slot)
            if self._num_entries == num_before:  # nothing has come into the order
                return
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
            self._all_places[ids] = np.arange(self._end, self._end + len(ids), dtype=np.int32)
            self._order.grow(self._num_entries + len(ids))
            self._order.all[self._num_entries : self._num_entries + len(ids)] = ids
            self._num_entries += len(ids)
            self._num_ordered += len(ids)
        self._tidy(SWEPT * len(slots) + MANY)

    def refresh(self, slots: Slots) -> None:
        """Make the cached ones among these blocks the most recent, the first of them still being evicted first."""
        self.lease(slots)
        self.release(slots)

    def lend(self, slots: Slots) -> None:
        """Lease the slots to a copy: cached ones keep their place in the order, and nobody is given them meanwhile.

        One that somebody leases too gets its place when those leases end, whether the copy is over or not.
        """
        ids = _ids(slots)
        free = ids[self._all_leases[ids] == 0]
        assert (self._all_places[free] >= self._head).all(), "a slot is blank: there is nothing to copy"
        self._leave_front(free)
        self._num_lent += len(free)
        self._num_copies += len(ids)
        self._all_leases[ids] += 1
        self._all_copies[ids] += 1

    def put_back(self, slots: Slots) -> None:
        """The copy is over."""
        ids = _ids(slots)
        assert (self._all_copies[ids] > 0).all(), "a slot is not lent"
        self._num_copies -= len(ids)
        self._all_copies[ids] -= 1
        self._all_leases[ids] -= 1
        free = ids[self._all_leases[ids] == 0]
        forgotten = free[self._all_places[free] < self._head]
        self._blank += forgotten.tolist()
        self._num_lent -= len(free) - len(forgotten)

    def commit(self, slots: Slots, names: Sequence[BlockName], start: int = 0) -> list[int]:
        """Name the blocks in the leased slots, so that they can be found: by *names* from *start* on.

        Give the list of all names of a chain, which may only grow: blocks of one list in a row are found fastest. Where
        another slot has a name already, the one given stays without; the result are their places in *slots*.
        """
        if len(slots) == 1:
            return self._commit_one(int(slots[0]), names, start)
        wanted, ids = _ints(slots), _ids(slots)
        all_names, names = names, names[start : start + len(wanted)] if len(wanted) < len(names) else names
        holders = self._slots.give_all(names, wanted)
        self.num_changes += 1
        if holders == wanted:
            before = self._slots.get(all_names[start - 1]) if start else None
            self._runs.add(before, all_names, start, ids)
            return []
        taken = []
        for place, (slot, holder) in enumerate(zip(wanted, holders, strict=True)):
            if slot == holder:
                self._runs.add(
                    None, all_names[max(0, start + place - 1) : start + place + 1], min(1, start + place), [slot]
                )
            else:
                taken.append(place)
        return taken

    def victims(self, num_slots: int) -> Ids:
        """Up to that many cached slots, in the order in which they would be evicted. Changes nothing."""
        start = self._head - self._front.begin
        if self._head + num_slots > self._front_end:
            self._look_ahead(num_slots)
            start = 0
        if self._head + num_slots <= self._front_end:
            self._given = self._front.ids[start : start + num_slots]
            return self._given
        oldest = self.oldest(num_slots + self._num_lent)  # lent ones are left out of it
        return oldest if len(oldest) <= num_slots else oldest[:num_slots]

    def oldest(self, window: int) -> Ids:
        """The cached slots in the first *window* places of that order; lent ones keep their place but do not count."""
        found: list[Ids] = []
        missing, start = min(window, self._num_ordered), self._head
        if self._end - start == self._num_ordered:  # every entry from the head on counts
            first = self._entries(start, start + missing)
            return cast(Ids, first[self._all_leases[first] == 0]) if self._num_lent else first
        while missing > 0:
            start = self._past_gap(start)
            piece = self._entries(start, start + missing + MANY)
            counts = self._all_places[piece] == np.arange(start, start + len(piece), dtype=np.int32)
            live = piece if counts.all() else piece[counts]
            if not found:  # entries before the first that counts are done with
                self._head = start + (int(counts.argmax()) if len(live) else len(piece))
            if len(live):
                found.append(live[:missing])
            missing, start = missing - len(live), start + len(piece)
        slots = found[0] if len(found) == 1 else np.concatenate(found) if found else NOTHING
        return cast(Ids, slots[self._all_leases[slots] == 0]) if self._num_lent else slots

    def ordered(self, start: int, most: int) -> tuple[Ids, int | None]:
        """The cached slots, oldest first, among *most* entries of the order from its entry *start* on, and the entry
        after these, None at the end. Entries only move to the end, where nothing comes between them."""
        start = max(start, self._head)
        entries = self._entries(start, start + most)
        is_cached = self._all_places[entries] == np.arange(start, start + len(entries), dtype=np.int32)
        end = start + len(entries)
        return entries[is_cached & (self._all_leases[entries] == 0)], end if end < self._end else None

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

    def evict_for(self, num_slots: int, victims: Ids) -> tuple[list[int], list[BlockName]]:
        """Lease all blank slots and after them these cached ones, *num_slots* together; also the names these lose."""
        if victims is self._given and len(victims):
            return self._evict_front(num_slots)
        evicted = cast(list[int], victims.tolist())
        end = self._head + len(evicted)
        if self._all_places[victims].tobytes() == np.arange(self._head, end, dtype=np.int32).tobytes():
            self._head = end  # which takes all of them out of the order
        else:
            self._leave_front(victims)
            self._all_places[victims] = NOWHERE
        names = self._unname(victims)
        self._num_ordered -= len(evicted)
        self.num_departures += len(evicted)
        self._all_leases[victims] = 1
        return self._with_blank(evicted, num_slots), names

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
        assert all(self._order.items[self._places[slot] - self._before] == slot for slot in ordered), (
            "a slot is not where its place says"
        )
        free = {slot for slot in range(self.num_slots) if self._leases[slot] == 0}
        lent = ordered - free
        assert len(lent) == self._num_lent, "the lent slots were miscounted"
        assert free == blank | (ordered - lent), "a slot is leased and free, or neither"
        assert all(self._leases[slot] == self._copies[slot] for slot in lent), "a lent slot is leased by others too"
        assert all(count <= self._leases[slot] for slot, count in enumerate(self._copies)), "a copy has no lease"
        assert sum(self._copies) == self._num_copies, "the copies were miscounted"
        named = {slot for slot in range(self.num_slots) if self._spots[slot] != NO_SPOT}
        assert not blank & named, "a blank slot has a name"
        assert ordered <= named, "a cached slot has no name"
        assert {slot for _, slot in self._slots.items()} == named, "names and slots disagree"
        self._runs.check()
        assert all(self.name(slot) == name for name, slot in self._slots.items()), "a name points to another's slot"

    def _commit_one(self, slot: int, names: Sequence[BlockName], start: int) -> list[int]:
        assert self._leases[slot], "only a leased slot's bytes are anyone's to name"
        assert self._spots[slot] == NO_SPOT, "a slot has a name already"
        name = names[start]
        if self._slots.give(name, slot) != slot:
            return [0]
        self.num_changes += 1
        if len(names) == 1:
            self._runs.add_alone(slot, name)
        else:
            self._runs.add(self._slots.get(names[start - 1]) if start else None, names, start, [slot])
        return []

    def _look_ahead(self, num_slots: int) -> None:
        """Look through the eviction end, for this eviction and the next ones."""
        self._head = self._past_gap(self._head)
        start, most = self._head, min(max(FEW, LOOKED_AHEAD * num_slots), max(MOST_LOOKED_AT, num_slots))
        ids = self._entries(start, start + most)
        others = self._all_places[ids] != np.arange(start, start + len(ids), dtype=np.int32)
        if self._num_lent:
            others |= self._all_leases[ids] != 0
        ids = ids[: int(others.argmax())] if others.any() else ids
        if len(ids):
            self._front = Front(start, ids, self._runs.spans(ids))
            self._front_end = start + len(ids)

    def _leave_front(self, ids: Ids) -> None:
        """These cached slots leave the order, or their place in it for a while."""
        if len(ids) and self._head < self._front_end:
            self._front_end = min(self._front_end, int(self._all_places[ids].min()))

    def _evict_front(self, num_slots: int) -> tuple[list[int], list[BlockName]]:
        """`evict_for` of what `victims` gave last, if that was of `_front`."""
        front, victims, start = self._front, self._given, self._head - self._front.begin
        end = start + len(victims)
        self._given = NOTHING
        self._head += len(victims)
        self._num_ordered -= len(victims)
        self.num_departures += len(victims)
        names = self._runs.remove_spans(victims, front.take(start, end))
        self._all_leases[victims] = 1
        self._unindex(names)
        return self._with_blank(victims.tolist(), num_slots), names

    def _with_blank(self, evicted: list[int], num_slots: int) -> list[int]:
        """All blank slots, leased from now on, and after them the evicted ones."""
        slots = evicted
        if self._blank:
            slots = self._blank[::-1] + evicted
            self._all_leases[self._blank] = 1
            self._blank.clear()
        assert len(slots) == num_slots, "as many victims as blank slots are missing"
        return slots

    def _let_go(self, ids: Ids, counts: npt.NDArray[np.int32]) -> Ids:
        """Those of the slots, with so many leases left, that nobody but copies leases; they get their place now."""
        if not self._num_copies:
            return cast(Ids, ids[counts == 0])
        is_lent = (counts > 0) & (counts == self._all_copies[ids])
        is_named = self._all_spots[ids] != NO_SPOT
        self._num_lent += int(np.count_nonzero(is_lent & is_named))
        return cast(Ids, ids[(counts == 0) | (is_lent & is_named)])

    def _forget(self, ids: Ids) -> list[BlockName]:
        """Take the named slots out of index and order; their names."""
        if not len(ids):
            return []
        ordered = ids[self._all_places[ids] >= self._head]
        self._leave_front(ordered)
        self._num_ordered -= len(ordered)
        self.num_departures += len(ordered)
        if self._num_lent:
            self._num_lent -= int(np.count_nonzero(self._all_leases[ordered]))
        self._all_places[ids] = NOWHERE
        return self._unname(ids)

    def _unname(self, ids: Ids) -> list[BlockName]:
        """Take the named slots out of the index; their names."""
        names = self._runs.remove(ids)
        self._unindex(names)
        return names

    def _unindex(self, names: Sequence[BlockName]) -> None:
        self._slots.remove_all(names)
        self.num_changes += 1

    @property
    def _end(self) -> int:
        """The place of the next slot that becomes free."""
        return self._before + self._num_entries

    def _entries(self, start: int, end: int) -> Ids:
        """The entries of the order from *start* to before *end*, as far as there are any."""
        start, end = start - self._before, end - self._before
        return cast(Ids, self._order.all[start : min(end, self._num_entries)].astype(np.intp))

    def _tidy(self, num_entries: int) -> None:
        """Look through so many entries of the order, if there are many or the first ones that do not count."""
        if self._num_entries > self._most_entries:
            self._sweep_some(num_entries)
        if self._head < self._end and self._places[self._order.items[self._head - self._before]] != self._head:
            start = self._past_gap(self._head)
            entries = self._entries(start, start + num_entries)
            counts = self._all_places[entries] == np.arange(start, start + len(entries), dtype=np.int32)
            self._head = start + (int(counts.argmax()) if counts.any() else len(entries))

    def _sweep_some(self, num_entries: int) -> None:
        """Move what counts of so many entries of the order towards its end; in the end cut off what was before."""
        sweep = self._sweep
        if sweep is None:
            self._rebase()
            sweep = self._sweep = Sweep(self._end, self._end)
        start = max(self._head, sweep.read - num_entries)
        if start < sweep.read:
            entries = self._entries(start, sweep.read)
            live = entries[self._all_places[entries] == np.arange(start, sweep.read, dtype=np.int32)]
            self._front_end = min(self._front_end, start)
            end, sweep.read, sweep.written = sweep.written, start, sweep.written - len(live)
            self._all_places[live] = np.arange(sweep.written, end, dtype=np.int32)
            self._order.all[sweep.written - self._before : end - self._before] = live
        else:
            self._head = max(self._head, sweep.written)
            self._num_entries = self._end - self._head
            self._order.drop(self._head - self._before, self._num_entries)
            self._before = self._head
            self._sweep = None

    def _past_gap(self, place: int) -> int:
        """The place, or where the entries go on if a sweep has left none there."""
        sweep = self._sweep
        return place if sweep is None or not sweep.read <= place < sweep.written else sweep.written

    def _rebase(self) -> None:
        """Count places from 0 again, long before they are too large for their arrays."""
        if self._before > MOST_PLACES:
            np.maximum(self._all_places - self._before, NOWHERE, out=self._all_places)
            self._head -= self._before
            self._before = self._front_end = 0


def _view(numbers: "array[int]") -> npt.NDArray[np.int32]:
    return np.frombuffer(numbers, np.int32) if numbers else np.empty(0, np.int32)


def _ids(slots: Slots) -> Ids:
    return np.asarray(_view(slots) if isinstance(slots, array) else slots, np.intp)


def _ints(slots: Slots) -> list[int]:
    if isinstance(slots, list):
        return slots
    return cast(list[int], slots.tolist()) if isinstance(slots, (np.ndarray, array)) else list(slots)
