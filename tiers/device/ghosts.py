"""Ghosts: which tier dropped a block that no tier has any more, to tell "evicted" from "never seen"."""

from collections.abc import Sequence
from itertools import chain, groupby
from operator import itemgetter

import numpy as np

from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Tier

_TIERS = tuple(Tier)
NUM_GHOSTS = 1 << 16  # names of lost blocks that are remembered, to tell "evicted" from "never seen"
MOST_PENDING = 2048  # names: half a millisecond's work at once


class Ghosts:
    """Remembers the last *num_names* lost blocks, by the first 64 bits of their names: a mistake is a wrong statistic.

    The names are in a ring that is searched as a whole, once a request. A look-up in a set or dict is faster, but every
    eviction costs three to five times as much, and it keeps the names. Names that come in small numbers are put into
    the ring many at a time.
    """

    def __init__(self, num_names: int) -> None:
        self._prefixes = np.zeros(num_names, np.uint64)
        self._tiers = np.zeros(num_names, np.uint8)
        self._next = 0
        self._pending: list[tuple[Sequence[BlockName], Tier]] = []  # not in the ring yet, oldest first
        self._num_pending = 0

    def remember(self, names: Sequence[BlockName], tier: Tier) -> None:
        """Note that *tier* dropped the last copies of these blocks. Their names have one length; the list is kept."""
        if not names:
            return
        self._pending.append((names, tier))
        self._num_pending += len(names)
        if self._num_pending >= MOST_PENDING:
            self._take_in()

    def dropped_by(self, name: BlockName) -> Tier | None:
        """The tier that dropped the block's last copy; None if there was none, or it is too long ago."""
        self._take_in()
        places = np.flatnonzero(self._prefixes == np.frombuffer(name[:8], np.uint64))
        if not len(places):
            return None
        newest = places[np.argmax((places - self._next) % len(self._prefixes))]
        return _TIERS[int(self._tiers[newest])]

    def _take_in(self) -> None:
        for tier, group in groupby(self._pending, itemgetter(1)):
            kept = list(chain.from_iterable(names for names, _ in group))[-len(self._prefixes) :]
            prefixes = np.frombuffer(b"".join(kept), np.uint64)[:: len(kept[0]) // 8]
            fits = min(len(kept), len(self._prefixes) - self._next)
            for start, some in ((self._next, prefixes[:fits]), (0, prefixes[fits:])):
                self._prefixes[start : start + len(some)] = some
                self._tiers[start : start + len(some)] = _TIERS.index(tier)
            self._next = (self._next + len(kept)) % len(self._prefixes)
        self._pending.clear()
        self._num_pending = 0
