"""SlotPurge: evicts selected blocks from one group's slots at an operator's request, in small parts."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.group_slots import GroupSlots
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.tier import EvictionCause

SCAN_ENTRIES = 1 << 12  # entries of the eviction order examined per part
MAX_EVICTED = 256  # blocks evicted per part, which takes half a millisecond including callbacks
COUNTED = 1 << 16  # slots whose leases are counted per numpy call


class SlotPurge:
    """A purge of one attention group's slots, requested by an operator.

    Blocks are evicted in the order in which a full pool would evict them, the least recently used first. Blocks that a
    request leases or that are being copied are not evicted.
    """

    def __init__(
        self,
        slots: GroupSlots,
        limit: int | None = None,
        matches: Callable[[Ids], npt.NDArray[np.bool_]] | None = None,
    ) -> None:
        """Prepare a purge of up to *limit* blocks (None: all).

        *matches* returns for each of the given slots whether its block is to be purged (None: purge all blocks).
        """
        self._slots = slots
        self._limit = limit
        self._are_meant = matches
        self.num_evicted = 0

    @property
    def is_settled(self) -> bool:
        """True if no block of these slots is being copied to a lower tier."""
        return not self._slots.pool.order.num_lent

    def parts(self) -> Iterator[bool]:
        """Go through the eviction order once and evict the selected blocks, part by part; see `Purge.parts`."""
        start: int | None = 0
        while start is not None and self._num_left != 0:
            slots, end = self._slots.pool.order.part(start, SCAN_ENTRIES)
            meant = self._meant(slots)
            going = meant[: MAX_EVICTED if self._num_left is None else min(MAX_EVICTED, self._num_left)]
            if len(going):
                self._slots.evict(going, EvictionCause.CLEARED)
                self.num_evicted += len(going)
            if len(going) == len(meant):
                start = end
            yield True

    def num_leased(self) -> int:
        """Return how many of the blocks to be purged are leased now. Takes 5 ms for a million slots."""
        pool, num_leased = self._slots.pool, 0
        for first in range(0, pool.num_slots, COUNTED):
            slots = np.arange(first, min(first + COUNTED, pool.num_slots))
            slots = self._meant(slots[pool.are_named(slots)])
            num_leased += pool.num_leased(slots)
        return num_leased

    @property
    def _num_left(self) -> int | None:
        return None if self._limit is None else self._limit - self.num_evicted

    def _meant(self, slots: Ids) -> Ids:
        return slots if self._are_meant is None or not len(slots) else slots[self._are_meant(slots)]
