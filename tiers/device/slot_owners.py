"""SlotOwners: the tenant of each block in one group's device slots."""

import numpy as np

from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.tenant import OwnerNumbers, number_of


class SlotOwners:
    """A tenant for each slot, at first the one without a name. Owned by the cache's thread."""

    def __init__(self, num_slots: int) -> None:
        self._numbers = np.zeros(num_slots, np.uint64)
        self._any_named = False  # whether any slot is of a tenant with a name

    def record(self, slots: Ids, tenant: bytes) -> None:
        """Note that the tenant's blocks are in these slots."""
        if not tenant and not self._any_named:
            return  # all slots are of the tenant without a name already
        self._any_named = True
        self._numbers[slots] = number_of(tenant)

    def of(self, slots: Ids) -> OwnerNumbers:
        """The tenants of the blocks in the slots."""
        return self._numbers[slots]
