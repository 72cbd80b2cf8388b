"""EvictionOrder: the slots whose blocks may be evicted, in the order in which they became free."""

from array import array
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.growing_rows import GrowingRows
from kvtier.tiers.device.runs import Runs, Span
from kvtier.tiers.device.slot_ids import MANY, NOTHING, Ids, view_of

NO_PLACE = -1  # of a slot that is not in the order
FEW = 16
SWEPT = 2  # entries for each that is appended: while the order is swept it grows by half of what it has
MOST_PLACES = 1 << 30
LOOKED_AHEAD = 16  # times as many slots at the eviction end are looked at as are wanted now
MOST_LOOKED_AT = 1024


@dataclass(slots=True)
class Front:
    """The next slots to evict, looked through once for many evictions. *begin* is the place of the first one in the
    order, *spans* are their blocks in pieces of runs."""

    begin: int
    ids: Ids
    spans: list[Span]
    next_span: int = 0  # the spans before it are gone

    def take(self, start: int, end: int) -> list[Span]:
        """Remove the spans between these places, or parts of them; the removed ones."""
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
    """How far the entries that count have been moved together: those from place *read* on stand from *written* on, and
    between the two none counts."""

    read: int
    written: int


class EvictionOrder:
    """A queue of slots; the first is evicted next. A slot is in it once or not at all; a lent slot is in it and is
    passed over. Owned by its pool.

    An entry counts only if it is where `_places` says, and not before the queue's head. So leaving the order costs
    nothing, and chains of thousands of blocks come and go at numpy's speed, while single slots are array items, at the
    speed of a list's. When the entries that do not count are as many as the slots, a part of the others is moved
    towards the end with each call.
    """

    def __init__(self, num_slots: int, runs: Runs) -> None:
        """*runs* has the blocks of the slots in the order."""
        self.num_slots = 0  # in the order, the lent ones too
        self.num_lent = 0
        self.num_departures = 0  # of slots from the order, ever
        self._runs = runs
        self._places = array("i", [NO_PLACE]) * num_slots
        self._all_places = view_of(self._places)
        self._is_lent = np.zeros(num_slots, np.bool_)
        self._rows = GrowingRows(np.int32, 1)  # entries: slots by the time when they became free
        self._num_entries = 0
        self._before = 0  # places before the first entry
        self._num_recounted = 0  # places that were dropped when places were counted anew
        self._most_entries = 2 * num_slots + MANY  # more of them, and a sweep begins
        self._sweep: Sweep | None = None
        self._head = 0  # before it no entry counts
        self._front = Front(0, NOTHING, [])
        self._front_end = 0  # place up to which `_front` still holds, from the head on
        self._given = NOTHING  # the part of `_front` that `victims` gave last

    def append_few(self, slots: list[int]) -> None:
        """Put these slots, which are not in the order, at its end."""
        first, places = self._num_entries, self._places
        self._rows.grow(first + len(slots))
        items, place = self._rows.items, self._before + first
        for slot in slots:
            places[slot] = place
            items[place - self._before] = slot
            place += 1
        self._num_entries += len(slots)
        self.num_slots += len(slots)
        self._tidy(SWEPT * len(slots) + MANY)

    def append(self, ids: Ids) -> None:
        """The same for many slots at once."""
        self._all_places[ids] = np.arange(self._end, self._end + len(ids), dtype=np.int32)
        self._rows.grow(self._num_entries + len(ids))
        self._rows.all[self._num_entries : self._num_entries + len(ids)] = ids
        self._num_entries += len(ids)
        self.num_slots += len(ids)
        self._tidy(SWEPT * len(ids) + MANY)

    def remove_few(self, slots: list[int]) -> None:
        """Take the slots out of the order, if they are in it."""
        places, head = self._places, self._head
        for slot in slots:
            place = places[slot]
            if place >= head:
                if place < self._front_end:  # noqa: PLR1730  # min takes as long as the rest of this loop
                    self._front_end = place
                places[slot] = NO_PLACE
                self.num_slots -= 1
                self.num_departures += 1
                if self.num_lent and self._is_lent[slot]:
                    self._is_lent[slot] = False
                    self.num_lent -= 1

    def remove(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """The same for many slots at once; for each whether it was in the order."""
        was_here = self.holds(ids)
        leaving = ids[was_here]
        self._leave_front(leaving)
        self._all_places[ids] = NO_PLACE
        self.num_slots -= len(leaving)
        self.num_departures += len(leaving)
        if self.num_lent:
            self.num_lent -= int(np.count_nonzero(self._is_lent[leaving]))
            self._is_lent[leaving] = False
        self._tidy(SWEPT * len(ids) + MANY)
        return was_here

    def lend(self, ids: Ids) -> None:
        """Pass over these slots of the order until `put_back`; they keep their places."""
        assert self.holds(ids).all(), "a slot is blank: there is nothing to copy"
        self._leave_front(ids)
        self._is_lent[ids] = True
        self.num_lent += len(ids)

    def put_back(self, ids: Ids) -> None:
        """These lent slots are passed over no more."""
        self._is_lent[ids] = False
        self.num_lent -= len(ids)

    def holds(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """For each of the slots whether it is in the order."""
        return self._all_places[ids] >= self._head

    def place(self, slot: int) -> int | None:
        """The slot's place in the order, the lowest is evicted first; None if it has none."""
        return self._places[slot] + self._num_recounted if self._places[slot] >= self._head else None

    def newest(self) -> int | None:
        """The slot that became free last; None if that one is not in the order any more."""
        if self._head >= self._end:
            return None
        slot = self._rows.items[self._num_entries - 1]
        return slot if self._places[slot] == self._end - 1 else None

    def victims(self, num_slots: int) -> Ids:
        """The next slots to evict, up to *num_slots*. They stay in the order until `take`."""
        start = self._head - self._front.begin
        if self._head + num_slots > self._front_end:
            self._look_ahead(num_slots)
            start = 0
        if self._head + num_slots <= self._front_end:
            self._given = self._front.ids[start : start + num_slots]
            return self._given
        oldest = self.oldest(num_slots + self.num_lent)
        return oldest if len(oldest) <= num_slots else oldest[:num_slots]

    def take(self, victims: Ids) -> list[Span] | None:
        """Take these slots, none of them lent, out of the order. Their blocks as spans if `victims` gave just these."""
        num_taken, spans = len(victims), None
        if victims is self._given and num_taken:
            start = self._head - self._front.begin
            self._given = NOTHING
            self._head += num_taken  # so that their entries count no more
            spans = self._front.take(start, start + num_taken)
        elif self._all_places[victims].tobytes() == _row_of_places(self._head, num_taken).tobytes():
            self._head += num_taken
        else:
            self._leave_front(victims)
            self._all_places[victims] = NO_PLACE
        self.num_slots -= num_taken
        self.num_departures += num_taken
        return spans

    def oldest(self, window: int) -> Ids:
        """The slots in the first *window* places of the order, without the lent ones among them."""
        found: list[Ids] = []
        missing, start = min(window, self.num_slots), self._head
        if self._end - start == self.num_slots:  # every entry from the head on counts
            return self._without_lent(self._entries(start, start + missing))
        while missing > 0:
            start = self._past_gap(start)
            piece = self._entries(start, start + missing + MANY)
            counts = self._count(piece, start)
            live = piece if counts.all() else piece[counts]
            if not found:  # entries before the first that counts are done with
                self._head = start + (int(counts.argmax()) if len(live) else len(piece))
            if len(live):
                found.append(live[:missing])
            missing, start = missing - len(live), start + len(piece)
        return self._without_lent(found[0] if len(found) == 1 else np.concatenate(found) if found else NOTHING)

    def part(self, start: int, most: int) -> tuple[Ids, int | None]:
        """The slots that are not lent among *most* entries from entry *start* on, and the entry after these, None at
        the end. An entry's number may be kept for a later call: entries only move to the end, where nothing comes
        between them, and the numbers go on when places are counted anew."""
        start = max(start - self._num_recounted, self._head)
        entries = self._entries(start, start + most)
        live, end = entries[self._count(entries, start)], start + len(entries)
        return self._without_lent(live), end + self._num_recounted if end < self._end else None

    def check(self) -> None:
        """Raise AssertionError if the order's books disagree."""
        here = [slot for slot, place in enumerate(self._places) if place >= self._head]
        assert len(here) == self.num_slots, "the slots in the order were miscounted"
        assert all(self._rows.items[self._places[slot] - self._before] == slot for slot in here), (
            "a slot is not where its place says"
        )
        lent = np.flatnonzero(self._is_lent)
        assert len(lent) == self.num_lent, "the lent slots were miscounted"
        assert self.holds(lent).all(), "a slot that is not in the order is lent"

    @property
    def _end(self) -> int:
        """The place of the next slot that becomes free."""
        return self._before + self._num_entries

    def _entries(self, start: int, end: int) -> Ids:
        """The entries from place *start* to before *end*, as far as there are any."""
        start, end = start - self._before, end - self._before
        return cast(Ids, self._rows.all[start : min(end, self._num_entries)].astype(np.intp))

    def _count(self, entries: Ids, start: int) -> npt.NDArray[np.bool_]:
        """For each of the entries from place *start* on whether it counts."""
        counts: npt.NDArray[np.bool_] = self._all_places[entries] == _row_of_places(start, len(entries))
        return counts  # no cast: making that type takes 5 us

    def _without_lent(self, ids: Ids) -> Ids:
        return ids[~self._is_lent[ids]] if self.num_lent else ids

    def _look_ahead(self, num_slots: int) -> None:
        """Find the next slots to evict, for this eviction and many more."""
        self._head = self._past_gap(self._head)
        start, most = self._head, min(max(FEW, LOOKED_AHEAD * num_slots), max(MOST_LOOKED_AT, num_slots))
        ids = self._entries(start, start + most)
        others = self._all_places[ids] != _row_of_places(start, len(ids))
        if self.num_lent:
            others |= self._is_lent[ids]
        ids = ids[: int(others.argmax())] if others.any() else ids
        if len(ids):
            self._front = Front(start, ids, self._runs.spans(ids))
            self._front_end = start + len(ids)

    def _leave_front(self, ids: Ids) -> None:
        """Cut the front off before these slots of the order, which leave it or are lent."""
        if len(ids) and self._head < self._front_end:
            self._front_end = min(self._front_end, int(self._all_places[ids].min()))

    def _tidy(self, num_entries: int) -> None:
        """Go on with a sweep if there are many entries, and move the head past entries that do not count.

        *num_entries* are looked through at most."""
        if self._num_entries > self._most_entries:
            self._sweep_some(num_entries)
        if self._head < self._end and self._places[self._rows.items[self._head - self._before]] != self._head:
            start = self._past_gap(self._head)
            entries = self._entries(start, start + num_entries)
            counts = self._count(entries, start)
            self._head = start + (int(counts.argmax()) if counts.any() else len(entries))

    def _sweep_some(self, num_entries: int) -> None:
        """Move the entries that count, of the next *num_entries*, towards the end; after the last one drop the gap."""
        sweep = self._sweep
        if sweep is None:
            self._recount()
            sweep = self._sweep = Sweep(self._end, self._end)
        start = max(self._head, sweep.read - num_entries)
        if start < sweep.read:
            entries = self._entries(start, sweep.read)
            live = entries[self._count(entries, start)]
            self._front_end = min(self._front_end, start)
            end, sweep.read, sweep.written = sweep.written, start, sweep.written - len(live)
            self._all_places[live] = _row_of_places(sweep.written, len(live))
            self._rows.all[sweep.written - self._before : end - self._before] = live
        else:
            self._head = max(self._head, sweep.written)
            self._num_entries = self._end - self._head
            self._rows.drop(self._head - self._before, self._num_entries)
            self._before = self._head
            self._sweep = None

    def _past_gap(self, place: int) -> int:
        """The place, or the end of the gap that a sweep has left there."""
        sweep = self._sweep
        return place if sweep is None or not sweep.read <= place < sweep.written else sweep.written

    def _recount(self) -> None:
        """Count places from 0 again, long before they are too large for their arrays."""
        if self._before > MOST_PLACES:
            np.maximum(self._all_places - self._before, NO_PLACE, out=self._all_places)
            self._head -= self._before
            self._num_recounted += self._before
            self._before = self._front_end = 0


def _row_of_places(start: int, num_places: int) -> npt.NDArray[np.int32]:
    return np.arange(start, start + num_places, dtype=np.int32)
