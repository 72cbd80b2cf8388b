"""BlockPool: the slots of one attention group in one tier, their leases, and the block in each slot."""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.cleared_blocks import AT_ONCE, ClearedBlocks
from kvtier.tiers.device.eviction_order import NO_SPOT, EvictionOrder, Runs
from kvtier.tiers.device.name_table import NameTable
from kvtier.tiers.device.slot_ids import ABSENT, MANY, Ids, Slots, view_of
from kvtier.tiers.naming.block_hash import BlockName

NAME_BYTES = 32
MAX_IN_ONE = 3 << 13  # maximum slots of a pool with a single dict, which is rehashed in a millisecond
# Each dict of a larger pool has room for this many names, or for a power of two times as many. Python does not enlarge
# a dict that is less than a third full. So the dicts take the least memory if they are just below a third full.
DICT_ROOM = 1 << 14
MAX_SHARE = 0.95 / 3  # of that room, on average: the dicts' numbers of names vary by a few percent
MAX_DICTS = 256  # so that the index of a dict is a byte
PREFIX_BYTES = 2  # the first bytes of a name, which determine the dict
LISTED_AT_ONCE = 256  # minimum number of blank slots listed at once, see `BlockPool._list_blank`
SCANNED_AT_ONCE = 1 << 14  # slots searched at once for blank ones

SlotsByName = dict[BlockName, int]
FEW = 16  # minimum number of blocks for which checking first whether any of them is in the pool is faster
# Minimum mean length of runs (consecutive blocks of a prompt, see `Runs`) for which lookups by runs are faster. A run
# takes 6 us, and a lookup by name 80 to 170 ns.
MIN_RUN = 48
LARGE = 1 << 18  # minimum number of slots of a pool with a `NameTable`
LONG = 1024  # minimum number of blocks for which `has_no_run_of` may return True
RUN = 32  # `has_no_run_of` checks one block in this many


class SlotIndex:
    """A map from block names to slots, in Python dicts. A larger one has several, chosen by a name's first two bytes.

    Python rehashes a dict from time to time, which would take 0.1 s in a single dict with a million names. Choosing the
    dict costs 0.1 to 0.2 µs per name. Pools of `LARGE` and more slots have a `NameTable` instead.
    """

    def __init__(self, num_slots: int) -> None:
        num_dicts = _num_dicts(num_slots)
        self._begin(num_dicts)
        num_prefixes = 1 << 8 * PREFIX_BYTES if num_dicts > 1 else 0
        # [prefix of a name, as a little-endian number] index of the dict
        self._dict_ids = (np.arange(num_prefixes) * num_dicts >> 8 * PREFIX_BYTES).astype(np.uint8)
        self._ids_as_bytes = self._dict_ids.tobytes()

    def __len__(self) -> int:
        return sum(map(len, self._dicts))

    def items(self) -> Iterator[tuple[BlockName, int]]:
        """Yield all names and their slots."""
        for some in self._dicts:
            yield from some.items()

    def clear(self) -> Iterator[list[BlockName]]:
        """Remove all names at once. Return an iterator that yields them in parts and frees them."""
        dicts = self._dicts
        self._begin(len(dicts))
        return _popped(dicts)

    @property
    def max_in_one(self) -> int:
        """Number of names in the largest of the dicts.

        It determines the longest pause of the index, because Python rehashes a dict in one step.
        """
        return max(map(len, self._dicts))

    def get(self, name: BlockName) -> int | None:
        """Return the slot of the name; None if it has no slot, or if the name is empty."""
        return (self._dict_of(name) if self._one is None else self._one).get(name)

    def get_all(self, names: Sequence[BlockName], absent: int) -> list[int]:
        """Return the slot of each name, or *absent* for names without a slot."""
        if self._one is None:
            return list(map(dict.get, self._dicts_of(names), names, repeat(absent)))
        if len(names) > 1:
            try:
                return list(itemgetter(*names)(self._one))  # takes half the time, but needs all names to be present
            except KeyError:
                pass
        return list(map(self._one.get, names, repeat(absent)))

    def has_none(self, names: Sequence[BlockName]) -> bool:
        """Return whether none of the names has a slot."""
        if self._one is not None:
            return self._one.keys().isdisjoint(names)
        return not any(map(dict.__contains__, self._dicts_of(names), names))

    def give(self, name: BlockName, slot: int) -> int:
        """Assign *slot* to the name if the name has no slot yet, and return the slot that the name now has."""
        return (self._dict_of(name) if self._one is None else self._one).setdefault(name, slot)

    def give_all(self, names: Sequence[BlockName], slots: Iterable[int]) -> list[int]:
        """Give each name the slot at the same index, unless it has one already. Return each name's slot."""
        if self._one is not None:
            return list(map(self._one.setdefault, names, slots))
        return list(map(dict.setdefault, self._dicts_of(names), names, slots))

    def remove_all(self, names: Sequence[BlockName]) -> None:
        """Remove the names, which must all have slots."""
        if self._one is not None:
            index = self._one
            for name in names:
                del index[name]
            return
        for index, name in zip(self._dicts_of(names), names, strict=True):
            del index[name]

    def _begin(self, num_dicts: int) -> None:
        self._dicts: list[SlotsByName] = [{} for _ in range(num_dicts)]
        self._one = self._dicts[0] if num_dicts == 1 else None

    def _dict_of(self, name: BlockName) -> SlotsByName:
        return self._dicts[self._ids_as_bytes[int.from_bytes(name[:PREFIX_BYTES], "little")]]

    def _dicts_of(self, names: Sequence[BlockName]) -> Sequence[SlotsByName]:
        joined = b"".join(names)  # takes a third of the time of reading each name's first bytes
        if len(names) < 2 or len(joined) != NAME_BYTES * len(names):
            return list(map(self._dict_of, names))
        prefixes = np.frombuffer(joined, "<u2")[:: NAME_BYTES // PREFIX_BYTES]
        return cast(Sequence[SlotsByName], itemgetter(*self._dict_ids.take(prefixes).tobytes())(self._dicts))


def _popped(dicts: list[SlotsByName]) -> Iterator[list[BlockName]]:
    while dicts:
        some = dicts[-1]
        if not some:
            dicts.pop()
        else:
            yield [some.popitem()[0] for _ in range(min(len(some), AT_ONCE))]


def _num_dicts(num_slots: int) -> int:
    """Return how many dicts a pool's index should have."""
    room = DICT_ROOM
    while num_slots > MAX_DICTS * MAX_SHARE * room:
        room *= 2
    return 1 if num_slots <= MAX_IN_ONE else math.ceil(num_slots / (MAX_SHARE * room))


class BlockPool:
    """An LRU cache of blocks in *num_slots* slots. Only the thread that owns the pool may use it.

    A slot is either *leased* (in use) or *free*, and a free slot is either *blank* or *cached*. A blank slot holds no
    named block; blank slots are reused first, last in first out. A cached slot holds a named block, which can be found
    until the slot is needed for another block. Cached slots are evicted oldest first. Callers should release the last
    blocks of a prefix first, so that a block is evicted only after the blocks that continue it. At most one slot has a
    given name.

    The life of a slot, where *release* is the end of its last lease:

               allocate           commit                   release           evict
        blank ----------> leased --------> leased, named ---------> cached --------> blank
          ^                 | ^              |       ^               |  |
          +---- release ----+ +---- evict ---+       +---- lease ----+  |
                              ^                                         |
                              +--- allocate, once no slot is blank -----+

    While the block of a cached slot is copied to a lower tier, the slot is *lent* to the copy. A lent slot keeps its
    place in the eviction order, but is not evicted before `put_back`.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_changes = 0  # version of the index; lookup results are valid while it stays the same
        self.num_reserved = 0  # free slots reserved for promotions, see `reserve`; `num_free` excludes them
        # Blank slots are reused in this order: first those in `_blank`, from its end; then the *unlisted* ones, in
        # ascending order; then those in `_evicted`, from its end. A pool of any size is created and cleared fast,
        # because no list of the unlisted slots is built.
        self._blank: list[int] = []
        self._is_unlisted = np.ones(num_slots, np.bool_)  # [slot]
        self._num_unlisted = num_slots  # number of unlisted slots and slots in `_evicted`
        self._next_unlisted = 0  # no slot before this one is unlisted
        self._evicted: list[int] = []  # blank slots whose blocks were evicted while slots were unlisted
        self._slots = NameTable(num_slots) if num_slots >= LARGE else SlotIndex(num_slots)
        self._runs = Runs(num_slots)
        self.order = EvictionOrder(num_slots, self._runs)  # of cached and lent slots; only the pool modifies it
        self._leases = array("i", [0]) * num_slots  # [slot] number of leases
        self._copies = array("i", [0]) * num_slots  # [slot] number of leases held by copies
        self._num_copies = 0  # sum of `_copies`
        self._spots = self._runs.spots  # [slot] the slot's spot: a number that says which block it holds, or NO_SPOT
        self._all_leases = view_of(self._leases)  # numpy view of the same memory
        self._all_copies = view_of(self._copies)
        self._all_spots = np.frombuffer(self._spots, np.int64) if num_slots else np.empty(0, np.int64)
        # The following methods are those of the index and of the runs. Forwarding methods would make each call slower.
        # `find(name)` returns the slot that holds the block, or None. `has_none(names)` returns whether none of the
        # blocks is in the pool.
        self.find, self.has_none = self._slots.get, self._slots.has_none
        # `name(slot)` returns the name of the slot's block, and `parent(slot)` the name of the block that it continues;
        # either may be None. `rows(slots)` returns the names of the slots' blocks, in rows of consecutive blocks.
        self.name, self.parent, self.rows = self._runs.name, self._runs.parent, self._runs.rows

    @property
    def num_free(self) -> int:
        """Number of slots that `allocate` could return, with evictions.

        Negative if fewer slots are available than reserved, because some are being copied to a lower tier.
        """
        return self.num_blank + self.order.num_slots - self.order.num_lent - self.num_reserved

    @property
    def num_blank(self) -> int:
        """Number of slots that `allocate` could return without evictions."""
        return len(self._blank) + self._num_unlisted

    @property
    def num_named(self) -> int:
        """Number of named blocks, which lookups can find."""
        return len(self._slots)

    @property
    def num_leases(self) -> int:
        """Number of leases on all slots."""
        return int(self._all_leases.sum())

    @property
    def num_leased_slots(self) -> int:
        """Number of slots that are leased."""
        return int(np.count_nonzero(self._all_leases))

    def find_all(self, names: Sequence[BlockName]) -> npt.NDArray[np.int32]:
        """Return the slot of each block, ABSENT for blocks that are not in the pool."""
        found: list[npt.NDArray[np.int32]] = []
        start = 0
        while len(names) - start >= MANY:
            slot = self._slots.get(names[start])
            if slot is None:
                break
            following = self._runs.following(slot, names, start)
            found.append(following)
            start += len(following)
            if start < MIN_RUN * len(found):  # the runs are short: look up the other blocks one by one
                break
        if start < len(names):
            rest = names[start:] if start else names
            if len(rest) >= FEW and self._slots.has_none(rest):  # typical for a prompt that is in another tier
                found.append(np.full(len(rest), ABSENT, np.int32))
            else:
                found.append(np.asarray(self._slots.get_all(rest, ABSENT), np.int32))
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.int32), *found])

    def has_no_run_of(self, names: Sequence[BlockName]) -> bool:
        """Return whether the pool has neither the first of these blocks nor any `RUN` consecutive ones.

        If True, the pool may still have shorter runs of these blocks. Always False for fewer than `LONG` blocks. Takes
        a tenth of the time of `find_all`.
        """
        return len(names) >= LONG and self._slots.get(names[0]) is None and self._slots.has_none(names[RUN - 1 :: RUN])

    def are_named(self, slots: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """Return for each slot whether it holds a named block."""
        named: npt.NDArray[np.bool_] = self._all_spots[slots] != NO_SPOT  # not cast(), which takes 5 us for this type
        return named

    def spots(self, slots: Ids) -> npt.NDArray[np.int64]:
        """Return for each slot its *spot*, a number that says which block it holds.

        It is NO_SPOT if the slot holds no block that lookups can find.
        """
        return self._all_spots[slots]

    def is_free(self, slot: int) -> bool:
        """Return whether the slot has no lease."""
        return self._leases[slot] == 0

    def are_leased(self, slots: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """Return for each slot whether it is leased."""
        leased: npt.NDArray[np.bool_] = self._all_leases[slots] > 0
        return leased

    def num_leased(self, slots: npt.NDArray[np.integer[Any]]) -> int:
        """Return how many of the slots are leased."""
        return int(np.count_nonzero(self._all_leases[slots]))

    def reserve(self, num_slots: int) -> None:
        """Reduce `num_free` by *num_slots* until `unreserve`, so that this many slots stay available to the caller."""
        self.num_reserved += num_slots

    def unreserve(self, num_slots: int) -> None:
        """End the reservation of *num_slots* slots."""
        self.num_reserved -= num_slots

    def allocate(self, num_slots: int) -> list[int] | None:
        """Lease *num_slots* slots: blank ones first, then the oldest cached ones, whose blocks are evicted.

        Returns None without any effect if too few slots are free.
        """
        blank, leases = self._blank, self._leases
        if self.num_reserved and num_slots > self.num_free:
            return None
        if num_slots == 1 and blank:
            slot = blank.pop()
            leases[slot] = 1
            return [slot]
        cut = len(blank) - num_slots
        if cut < 0 and self._num_unlisted:
            self._list_blank(num_slots)
            cut = len(blank) - num_slots
        if cut < 0:
            if num_slots > self.num_free:
                return None
            return cast(list[int], self.evict_and_lease(num_slots, self.order.victims(-cut))[0].tolist())
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
        """Lease the given slots, which must be blank: not leased, and without a cached block.

        Takes time proportional to the number of blank slots that are in lists. Unlisted slots take no time.
        """
        wanted = np.zeros(self.num_slots, np.bool_)
        wanted[slots] = True
        unlisted = slots[self._is_unlisted[slots]]
        self._is_unlisted[unlisted] = False
        num_found = len(unlisted)
        self._num_unlisted -= num_found
        for some in (self._blank, self._evicted):
            blank = np.array(some, np.intp)
            is_wanted = wanted[blank]
            some[:] = blank[~is_wanted].tolist()
            num_found += len(blank) - len(some)
            self._num_unlisted -= (len(blank) - len(some)) * (some is self._evicted)
        assert num_found == len(slots), "a slot is not blank"
        self._all_leases[slots] = 1

    def lease(self, slots: Slots) -> None:
        """Add a lease to each slot, which must hold a cached block or be leased already.

        Cached slots leave the eviction order.
        """
        if len(slots) < MANY:
            leases, any_copies = self._leases, self._num_copies
            cached: list[int] | None = None
            for slot in slots:
                count = leases[slot]
                if not count or any_copies:  # otherwise the slot has no place in the order
                    assert count or self._spots[slot] != NO_SPOT, f"slot {slot} is blank: there is nothing to lease"
                    cached = cached or []  # created only if needed, because this takes 4% of a call's time
                    cached.append(slot)
                leases[slot] = count + 1
            if cached:
                self.order.remove_few(cached)
            return
        ids = np.asarray(slots, np.intp)
        was_cached = self.order.remove(ids)
        assert (was_cached | (self._all_leases[ids] > 0)).all(), "a slot is blank: there is nothing to lease"
        self._all_leases[ids] += 1

    def release(self, slots: Slots) -> None:
        """Release one lease of each slot. The slots that become free will be evicted in the order given."""
        if len(slots) < MANY:
            leases, spots, blank = self._leases, self._spots, self._blank
            copies = self._copies if self._num_copies else None
            cached: list[int] | None = None
            for slot in slots if type(slots) is list else _as_ints(slots):
                left = leases[slot] - 1
                if left:
                    assert left > 0, f"slot {slot} is not leased"
                    leases[slot] = left
                    if copies is None or left != copies[slot]:
                        continue
                else:
                    leases[slot] = 0
                if spots[slot] != NO_SPOT:
                    cached = cached or []  # created only if needed, because this takes 4% of a call's time
                    cached.append(slot)
                elif not left:
                    blank.append(slot)
            if cached:
                self.order.append_few(cached)
                lent = [slot for slot in cached if leases[slot]] if copies is not None else []
                if lent:
                    self.order.lend(np.asarray(lent, np.intp))
            return
        ids = np.asarray(slots, np.intp)
        counts = self._all_leases[ids] - 1
        assert counts.min() >= 0, "a slot is not leased"
        self._all_leases[ids] = counts
        any_left = counts.any()
        if any_left:
            ids = self._let_go(ids, counts)
        is_named = self._all_spots[ids] != NO_SPOT
        if not is_named.all():
            self._blank += ids[~is_named].tolist()
            ids = ids[is_named]
        self.order.append(ids)
        if any_left and self._num_copies:
            self.order.lend(ids[self._all_leases[ids] > 0])

    def refresh(self, slots: Slots) -> None:
        """Mark the cached blocks in these slots as most recently used. They will be evicted in the order given."""
        self.lease(slots)
        self.release(slots)

    def lend(self, slots: Slots) -> None:
        """Lease the slots for a copy to a lower tier, but leave cached slots at their places in the eviction order.

        The slots are not evicted before `put_back`. If a request also leases such a slot, the slot gets a new place in
        the order when the request's lease ends, even if the copy is still running.
        """
        ids = np.asarray(slots, np.intp)
        self.order.lend(ids[self._all_leases[ids] == 0])
        self._num_copies += len(ids)
        self._all_leases[ids] += 1
        self._all_copies[ids] += 1

    def put_back(self, slots: Slots) -> None:
        """Release the leases that `lend` has created on these slots for a copy."""
        ids = np.asarray(slots, np.intp)
        assert (self._all_copies[ids] > 0).all(), "a slot is not lent"
        self._num_copies -= len(ids)
        self._all_copies[ids] -= 1
        self._all_leases[ids] -= 1
        free = ids[self._all_leases[ids] == 0]
        is_cached = self.order.holds(free)
        self.order.put_back(free[is_cached])
        self._blank += free[~is_cached].tolist()

    def commit(self, slots: Slots, names: list[BlockName], start: int = 0) -> list[int]:
        """Name the blocks in leased slots: the first one gets `names[start]`, the second `names[start + 1]`, and so on.

        Returns the indices of the slots that got no name because another slot already has that name. For fast lookups,
        pass the same list *names* in all calls for a prompt. The caller may only append to this list.
        """
        if len(slots) == 1:
            return self._commit_one(int(slots[0]), names, start)
        wanted, ids = _as_ints(slots), np.asarray(slots, np.intp)
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

    def commit_row(self, slots: Ids, names: list[BlockName], start: int) -> list[int]:
        """Name the blocks in leased slots: consecutive blocks of a prompt whose other blocks may come later or earlier.

        Unlike `commit`, which is for a prompt whose names are all in one list, this method joins the blocks to those
        before or after them that are in the pool, for fast lookups. The names of the blocks are `names[start:]`.
        *start* is 1 if the list begins with the name of the block before them, otherwise 0. The caller must not change
        the list afterwards.

        Returns the indices of the slots that got no name because another slot already has that name.
        """
        wanted = _as_ints(slots)
        holders = self._slots.give_all(names[start:], wanted)
        self.num_changes += 1
        if holders == wanted:
            self._runs.add_row(self._slots.get(names[0]) if start else None, names, start, slots)
            return []
        taken = [place for place, (slot, holder) in enumerate(zip(wanted, holders, strict=True)) if slot != holder]
        first = 0
        for end in [*taken, len(wanted)]:
            if first < end:
                begin = max(0, start + first - 1)
                has_parent = start + first > 0
                before = self._slots.get(names[begin]) if has_parent else None
                self._runs.add_row(before, names[begin : start + end], int(has_parent), slots[first:end])
            first = end + 1
        return taken

    def evict(self, slots: Slots) -> list[BlockName]:
        """Evict the blocks in these slots, leased or not, and return the names of the blocks.

        Slots without a named block are ignored. Of the others, free slots become blank, and are reused after all other
        blank slots, in the order given. Leased slots become blank when their last lease ends.
        """
        named = np.asarray(slots, np.intp)
        named = named[self._all_spots[named] != NO_SPOT]
        if not len(named):
            return []
        self.order.remove(named)
        names = self._runs.remove(named)
        self._forget(names, named)
        self.num_changes += 1
        freed = named[self._all_leases[named] == 0]
        if self._num_unlisted:
            self._evicted[:0] = freed[::-1].tolist()
            self._num_unlisted += len(freed)
        else:
            self._blank[:0] = freed[::-1].tolist()
        return names

    def clear(self) -> ClearedBlocks:
        """Evict the blocks in all slots, leased or not, in one short step. Return their data, which the caller frees.

        Free slots become blank, and are reused in ascending order. Leased slots, including lent ones, become blank when
        their last lease ends.
        """
        runs, alone = self._runs.clear()
        cleared = ClearedBlocks(self._slots.clear(), runs)
        if self.num_blank + self.order.num_slots - self.order.num_lent == self.num_slots:  # no slot is leased
            self._is_unlisted.fill(True)
        else:
            np.equal(self._all_leases, 0, out=self._is_unlisted)
        for some in (alone, self._blank, self._evicted):
            cleared.leftovers.add(some)
        self._blank, self._evicted = [], []
        self.order.clear()
        self._num_unlisted = int(np.count_nonzero(self._is_unlisted))
        self._next_unlisted = 0
        self.num_changes += 1
        return cleared

    def evict_and_lease(self, num_slots: int, victims: Ids) -> tuple[Ids, list[BlockName]]:
        """Evict the blocks in the slots *victims*, and lease these slots and all free slots without a block.

        *num_slots* must be the number of slots leased. Returns these slots, which the caller must not change, and the
        names of the evicted blocks.
        """
        spans = self.order.take(victims)
        names = self._runs.remove(victims) if spans is None else self._runs.remove_spans(victims, spans)
        self._forget(names, victims)
        self.num_changes += 1
        slots = victims
        if self._num_unlisted:
            self._list_blank(self.num_blank)
        if self._blank:
            slots = np.concatenate([np.array(self._blank[::-1], np.intp), victims])
            self._blank.clear()
        self._all_leases[slots] = 1
        assert len(slots) == num_slots, "the blank slots and the victims are not num_slots in total"
        return slots, names

    def blank_slots(self) -> list[int]:
        """Return all free slots without a cached block, in the order in which they are reused."""
        return self._blank[::-1] + np.flatnonzero(self._is_unlisted).tolist() + self._evicted[::-1]

    def cached_slots(self) -> list[int]:
        """Return all cached slots that are not lent, oldest first."""
        return cast(list[int], self.order.victims(self.num_slots).tolist())

    def check(self) -> None:
        """Raise AssertionError if the pool is inconsistent."""
        assert (self._all_leases >= 0).all(), "a slot was released more often than leased"
        assert self.num_reserved >= 0, "a reservation was ended twice"
        blank = set(self.blank_slots())
        assert len(blank) == self.num_blank, "a slot is blank twice"
        assert not self._is_unlisted[: self._next_unlisted].any(), "an unlisted slot would never be used"
        ordered = set(np.flatnonzero(self.order.holds(np.arange(self.num_slots))).tolist())
        assert not blank & ordered, "a slot is blank and cached"
        self.order.check()
        free = {slot for slot in range(self.num_slots) if self._leases[slot] == 0}
        lent = ordered - free
        assert len(lent) == self.order.num_lent, "the lent slots were miscounted"
        assert free == blank | (ordered - lent), "a slot is leased and free, or neither"
        assert all(self._leases[slot] == self._copies[slot] for slot in lent), "a lent slot is leased by a request too"
        assert all(count <= self._leases[slot] for slot, count in enumerate(self._copies)), "a copy has no lease"
        assert sum(self._copies) == self._num_copies, "the copies were miscounted"
        named = {slot for slot in range(self.num_slots) if self._spots[slot] != NO_SPOT}
        assert not blank & named, "a blank slot has a name"
        assert ordered <= named, "a cached slot has no name"
        assert {slot for _, slot in self._slots.items()} == named, "names and slots are inconsistent"
        self._runs.check()
        assert all(self.name(slot) == name for name, slot in self._slots.items()), "a name points to the wrong slot"

    def _forget(self, names: Sequence[BlockName], slots: Ids) -> None:
        """Remove these slots, whose blocks have these *names*, from the index."""
        if isinstance(self._slots, NameTable):
            self._slots.remove_all(slots)
        else:
            self._slots.remove_all(names)

    def _list_blank(self, num_slots: int) -> None:
        """Move blank slots to `_blank` until *num_slots* are there, or all."""
        blank = self._blank
        while len(blank) < num_slots and self._next_unlisted < self.num_slots:
            start, limit = self._next_unlisted, max(num_slots - len(blank), LISTED_AT_ONCE)
            slots = start + np.flatnonzero(self._is_unlisted[start : start + SCANNED_AT_ONCE])[:limit]
            self._next_unlisted = min(start + SCANNED_AT_ONCE, self.num_slots)
            if len(slots) == limit:
                self._next_unlisted = int(slots[-1]) + 1
            self._is_unlisted[slots] = False
            self._num_unlisted -= len(slots)
            blank[:0] = slots[::-1].tolist()
        if self._next_unlisted == self.num_slots:
            blank[:0] = self._evicted
            self._evicted.clear()
            self._num_unlisted = 0

    def _commit_one(self, slot: int, names: list[BlockName], start: int) -> list[int]:
        assert self._leases[slot], "a slot that is not leased cannot be named"
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

    def _let_go(self, ids: Ids, counts: npt.NDArray[np.int32]) -> Ids:
        """Return the slots that no request leases any more. *counts* holds the remaining leases of each slot."""
        if not self._num_copies:
            return cast(Ids, ids[counts == 0])
        is_named = self._all_spots[ids] != NO_SPOT
        return cast(Ids, ids[(counts == 0) | (is_named & (counts == self._all_copies[ids]))])


def _as_ints(slots: Slots) -> list[int]:
    if isinstance(slots, list):
        return slots
    return cast(list[int], slots.tolist()) if isinstance(slots, (np.ndarray, array)) else list(slots)
