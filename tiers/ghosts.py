"""Ghosts: which tier dropped a block that no tier has any more, to tell "evicted" from "never seen"."""

from collections.abc import Sequence

import numpy as np

from kvtier.tiers.block_hash import BlockName
from kvtier.tiers.tier import Tier

_TIERS = tuple(Tier)


class Ghosts:
    """Remembers the last *num_names* lost blocks, by the first 64 bits of their names: a mistake is a wrong statistic.

    A ring that is searched as a whole, once a request. A set or dict is found in at once, but costs every eviction
    three to five times as much, and keeps the names.
    """

    def __init__(self, num_names: int) -> None:
        self._prefixes = np.zeros(num_names, np.uint64)
        self._tiers = np.zeros(num_names, np.uint8)
        self._next = 0

    def remember(self, names: Sequence[BlockName], tier: Tier) -> None:
        """*tier* dropped the last copies of these blocks, whose names are of one length."""
        names = names[-len(self._prefixes) :]
        if not names:
            return
        places = np.arange(self._next, self._next + len(names)) % len(self._prefixes)
        self._prefixes[places] = np.frombuffer(b"".join(names), np.uint64)[:: len(names[0]) // 8]
        self._tiers[places] = _TIERS.index(tier)
        self._next = (int(places[-1]) + 1) % len(self._prefixes)

    def who_dropped(self, name: BlockName) -> Tier | None:
        """The tier that dropped the block's last copy; None if that was never, or too long ago."""
        places = np.flatnonzero(self._prefixes == np.frombuffer(name[:8], np.uint64))
        if not len(places):
            return None
        newest = places[np.argmax((places - self._next) % len(self._prefixes))]
        return _TIERS[int(self._tiers[newest])]
