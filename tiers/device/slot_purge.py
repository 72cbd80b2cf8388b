"""SlotPurge: evicts the blocks that an operator has asked for from one group's slots, a part at a time."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.group_slots import GroupSlots
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.eviction import EvictionCause

LOOKED_THROUGH = 1 << 12  # entries of the order at once
MAX_EVICTED = 256  # blocks at once: half a millisecond with all that is told of them
COUNTED = 1 << 16  # slots at once whose leases are counted


class SlotPurge:
    """Blocks leave oldest first, so tails before what they continue. What is leased, or lent to a copy, stays."""

    def __init__(
        self,
        slots: GroupSlots,
        limit: int | None = None,
        are_meant: Callable[[Ids], npt.NDArray[np.bool_]] | None = None,
    ) -> None:
        """*limit*: blocks at most; None: all. *are_meant*: which of some slots with a block are meant; None: all."""
        self._slots = slots
        self._limit = limit
        self._are_meant = are_meant
        self.num_evicted = 0

    @property
    def is_settled(self) -> bool:
        """Whether no block is being copied out of these slots."""
        return not self._slots.pool.order.num_lent

    def parts(self) -> Iterator[bool]:
        """See `Purge.parts`: one look through the order."""
        start: int | None = 0
        while start is not None and self._num_left != 0:
            slots, end = self._slots.pool.order.part(start, LOOKED_THROUGH)
            meant = self._meant(slots)
            going = meant[: MAX_EVICTED if self._num_left is None else min(MAX_EVICTED, self._num_left)]
            if len(going):
                self._slots.evict(going, EvictionCause.CLEARED)
                self.num_evicted += len(going)
            if len(going) == len(meant):
                start = end
            yield True

    def num_leased(self) -> int:
        """Blocks that are meant and leased now. Counted in one go: 5 ms for a million slots."""
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
