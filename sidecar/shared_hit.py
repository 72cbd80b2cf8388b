"""SharedHit: the longest cached prefix of a prompt that a client may lease in host memory."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.shares import Share, Wanted
from kvtier.tiers.lower.lower_tiers import NOWHERE, Places, are_cold
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import AttentionGroup, longest_hit
from kvtier.tiers.naming.tier import Reason

NUM_NEAR = 8  # chunks before the end of the keys and values, of which one may have had the state that was evicted


def needed(group: AttentionGroup, num_chunks: int) -> range:
    """Return the range of chunks that *group* needs for a hit of *num_chunks* chunks."""
    return range(group.first_needed(num_chunks * group.block_size), num_chunks)


def longest_of(groups: Sequence[AttentionGroup], are_there: Sequence[npt.NDArray[np.bool_]], num_chunks: int) -> int:
    """Return the length of the longest hit, up to *num_chunks*, for which each group has all chunks that it needs.

    Lengths are in chunks. *are_there* has one array per group, which says for each chunk whether the group has it. All
    groups have chunks of one size.
    """

    def first_hole(number: int, start: int, end: int) -> int:
        holes = np.flatnonzero(~are_there[number][start:end])
        return start + int(holes[0]) if len(holes) else end

    size = groups[0].block_size
    return longest_hit(num_chunks * size, groups, first_hole) // size


def misses_behind(
    num_there: int, num_lasting: int, names: Sequence[BlockName], tiers: LayoutTiers
) -> tuple[tuple[int, Reason], ...]:
    """Return why the chunks *names* behind a hit of *num_there* chunks are missing, as pairs (end, reason).

    The groups that do not forget have *num_lasting* chunks. Up to there, a state or a window is missing.
    """
    reasons = []
    if num_there < num_lasting:
        near = names[num_there:num_lasting][-NUM_NEAR:]
        lost = (why for name in reversed(near) if (why := tiers.miss_reason(name)) is not Reason.NEVER_SEEN)
        reasons.append((num_lasting, next(lost, Reason.NOT_KEPT)))
    if (end := max(num_there, num_lasting)) < len(names):
        reasons.append((len(names), tiers.miss_reason(names[end])))
    return tuple(reasons)


class SharedHit:
    """The longest cached prefix of a prompt after which a request can resume, limited to what the client may lease.

    A `SharedHit` leases no chunks, so they may be evicted at any time. All groups must have chunks of one size.
    """

    def __init__(
        self,
        tiers: LayoutTiers,
        groups: Mapping[int, AttentionGroup],
        names: Sequence[BlockName],
        share: Share,
        lost: Collection[tuple[int, int]] = (),
    ) -> None:
        """Look up the chunks *names* in all *groups*.

        Args:
            tiers: Tiers in which to look up the chunks.
            groups: Groups by their numbers in *tiers*.
            names: Names of the prompt's chunks, in order.
            share: Limit on what the client may lease.
            lost: Chunks that count as missing even if they are found, as pairs of a group's number and a place in
                *names*.
        """
        self._tiers = tiers
        self._groups = groups
        self._names = names
        self._places: dict[int, Places] = {}
        limit = len(names)
        for group_id in sorted(groups, key=lambda group_id: groups[group_id].forgets):
            own = names if limit == len(names) else names[:limit]
            if groups[group_id].forgets:
                self._places[group_id] = tiers.tiers.find(group_id, own)
            else:
                self._places[group_id] = tiers.tiers.find_run(group_id, own)
                limit = len(self._places[group_id])
        # Number of chunks up to which the groups that do not forget have all chunks; 0 without such a group.
        self.num_lasting = 0 if all(group.forgets for group in groups.values()) else limit
        self._are_there = {group_id: places != NOWHERE for group_id, places in self._places.items()}
        for group_id, place in lost:
            self._are_there[group_id][place : place + 1] = False
        self.num_there = self._longest(limit)
        self.num_chunks = self._within(share)  # the part that the client may lease

    @property
    def is_read(self) -> bool:
        """True if some chunks of the hit are not in host memory, so that they must be read."""
        return any(
            bool(are_cold(self._places[group_id][own.start : own.stop]).any())
            for group_id, own in self._needed(self.num_chunks).items()
        )

    def missing(self) -> Mapping[int, Sequence[BlockName]]:
        """Return, by group, the names of the chunks that a longer hit may need and that were not found."""
        found: dict[int, Sequence[BlockName]] = {}
        for group_id, group in self._groups.items():
            are_there = self._are_there[group_id]
            if not group.forgets:
                hole = int(np.argmin(np.append(are_there, False)))
                found[group_id] = self._names[hole:]
            else:
                first = group.first_needed((self.num_there + 1) * group.block_size)
                num_known = len(are_there)
                found[group_id] = [
                    self._names[place]
                    for place in range(first, len(self._names))
                    if place >= num_known or not are_there[place]
                ]
        return {group_id: names for group_id, names in found.items() if names}

    def within_room(self) -> int:
        """Make room in host memory for the hit, and return the length in chunks of its longest prefix that fits."""
        num_chunks = self.num_chunks
        while num_chunks:
            rooms = [
                (len(own), self._tiers.room_for(group_id, self._places[group_id][own.start : own.stop]))
                for group_id, own in self._needed(num_chunks).items()
            ]
            if all(room >= wanted for wanted, room in rooms):
                break
            num_chunks = self._longest(min(room for wanted, room in rooms if room < wanted))
        return num_chunks

    def _within(self, share: Share) -> int:
        num_chunks = self.num_there
        while num_chunks:
            wanted = [
                Wanted(self._tiers.memories[group_id], places[own.start : own.stop], self._names[own.start : own.stop])
                for group_id, own in self._needed(num_chunks).items()
                for places in [self._places[group_id]]
            ]
            num_affordable = share.num_affordable(wanted)
            if num_affordable >= max(len(each.places) for each in wanted):
                break
            num_chunks = self._longest(num_affordable)
        return num_chunks

    def _needed(self, num_chunks: int) -> Mapping[int, range]:
        return {group_id: needed(group, num_chunks) for group_id, group in self._groups.items()}

    def _longest(self, limit: int) -> int:
        return longest_of(list(self._groups.values()), [self._are_there[each] for each in self._groups], limit)
