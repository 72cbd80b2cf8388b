"""SlotOwners: whose the blocks in one group's device slots are."""

import numpy as np

from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.tenant import OwnerNumbers, number_of


class SlotOwners:
    """A tenant for each slot, nobody at first. Owned by the cache's thread."""

    def __init__(self, num_slots: int) -> None:
        self._numbers = np.zeros(num_slots, np.uint64)
        self._any_named = False  # a tenant with a name

    def record(self, slots: Ids, tenant: bytes) -> None:
        """The tenant's blocks are in these slots."""
        if not tenant and not self._any_named:
            return  # nobody's slots is what all are
        self._any_named = True
        self._numbers[slots] = number_of(tenant)

    def of(self, slots: Ids) -> OwnerNumbers:
        """Whose blocks are in the slots."""
        return self._numbers[slots]
