"""Ghosts: a record of lost blocks, which tells whether a missing block was evicted or was never cached."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import EvictionCause, Tier

_TIERS = tuple(Tier)
_CAUSES = tuple(EvictionCause)
_HOW = {(tier, cause): len(_CAUSES) * i + j for i, tier in enumerate(_TIERS) for j, cause in enumerate(_CAUSES)}
NUM_GHOSTS = 1 << 16  # lost blocks to remember
MAX_PENDING = 2048  # names added to the ring at once, which takes half a millisecond


class Ghost(NamedTuple):
    """The loss of a block: the tier that dropped its last copy, the cause and the time."""

    tier: Tier
    cause: EvictionCause
    at: float  # on the clock of the caller of `remember`


class Ghosts:
    """A ring buffer of the last *num_names* lost blocks, identified by the first 64 bits of their names.

    The record is used for statistics only, so it does no harm if two names share these bits. A search scans the whole
    ring, once per request. A set or dict would be faster to search, but would keep the names in memory and make every
    eviction three to five times as expensive. All names must have the same length.
    """

    def __init__(self, num_names: int) -> None:
        self._prefixes = np.zeros(num_names, np.uint64)
        self._how = np.zeros(num_names, np.uint8)  # index of the tier and of the cause, combined
        self._at = np.zeros(num_names)
        self._next = 0
        # Losses that are not in the ring yet, oldest first. Each call of `remember` appends one item to each list.
        self._pending: list[bytes] = []  # the names, concatenated
        self._pending_numbers: list[int] = []  # the number of names
        self._pending_how = array("B")
        self._pending_at = array("d")
        self._num_pending = 0

    def remember(self, names: Sequence[BlockName], tier: Tier, cause: EvictionCause, at: float) -> None:
        """Record that *tier* dropped the last copies of these blocks at time *at*."""
        if not names:
            return
        self._pending.append(b"".join(names))  # now, while the names are in the CPU's cache
        self._pending_numbers.append(len(names))
        self._pending_how.append(_HOW[tier, cause])
        self._pending_at.append(at)
        self._num_pending += len(names)
        if self._num_pending >= MAX_PENDING:
            self._take_in()

    def copy(self) -> "Ghosts":
        """Return a copy of this record of lost blocks, for another thread to search. Takes a tenth of a millisecond."""
        self._take_in()
        copied = Ghosts(0)
        copied._prefixes, copied._how, copied._at = self._prefixes.copy(), self._how.copy(), self._at.copy()
        copied._next = self._next
        return copied

    def find(self, name: BlockName) -> Ghost | None:
        """Return the last loss of the block; None if there was none, or if it is no longer remembered."""
        self._take_in()
        places = np.flatnonzero(self._prefixes == np.frombuffer(name[:8], np.uint64))
        return self._ghost(self._newest(places)) if len(places) else None

    def find_all(self, names: Sequence[BlockName], before: float = float("inf")) -> list[Ghost | None]:
        """Return for each block how and when the cache last dropped its only copy; None if this is not remembered.

        Losses at or after the time *before* are ignored. Takes milliseconds, but less than many calls of `find`.
        """
        self._take_in()
        wanted = np.frombuffer(b"".join(name[:8] for name in names), np.uint64)
        found: dict[int, int] = {}  # place in the ring by prefix
        places = np.flatnonzero(np.isin(self._prefixes, wanted) & (self._at < before))
        for place in places[np.argsort(self._age_order(places), kind="stable")].tolist():
            found[int(self._prefixes[place])] = place
        all_found = (found.get(prefix) for prefix in wanted.tolist())
        return [None if place is None else self._ghost(place) for place in all_found]

    def _age_order(self, places: Ids) -> Ids:
        return (places - self._next) % len(self._prefixes)  # 0 for the oldest place of the ring

    def _newest(self, places: Ids) -> int:
        return int(places[np.argmax(self._age_order(places))])

    def _ghost(self, place: int) -> Ghost:
        tier, cause = divmod(int(self._how[place]), len(_CAUSES))
        return Ghost(_TIERS[tier], _CAUSES[cause], float(self._at[place]))

    def _take_in(self) -> None:
        if not self._pending:
            return
        joined, limit = b"".join(self._pending), len(self._prefixes)
        prefixes = np.frombuffer(joined, np.uint64)[:: len(joined) // 8 // self._num_pending][-limit:]
        hows = np.repeat(np.frombuffer(self._pending_how, np.uint8), self._pending_numbers)[-limit:]
        ats = np.repeat(np.frombuffer(self._pending_at), self._pending_numbers)[-limit:]
        num_new = len(prefixes)
        fits = min(num_new, limit - self._next)
        for start, some in ((self._next, slice(0, fits)), (0, slice(fits, num_new))):
            end = start + len(prefixes[some])
            self._prefixes[start:end], self._how[start:end], self._at[start:end] = prefixes[some], hows[some], ats[some]
        self._next = (self._next + num_new) % limit
        self._pending, self._pending_numbers = [], []
        self._pending_how, self._pending_at = array("B"), array("d")
        self._num_pending = 0
