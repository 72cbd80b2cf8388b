"""PoisonedCache: for debugging, a cache whose slots hold NaN until something has been computed into them."""

from collections.abc import Sequence

from kvtier.tiers.cache import TieredCache
from kvtier.tiers.up.promotion import Tables
from kvtier.transfer.poisoned_memory import PoisonedMemory


class PoisonedCache(TieredCache):
    """A `TieredCache` over `PoisonedMemory`: a step that reads another request's slot, or too early, computes NaN."""

    def allocate(self, num_slots: Sequence[int]) -> Tables | None:
        tables = super().allocate(num_slots)
        for group, table in zip(self.residency.groups, tables or (), strict=bool(tables)):
            assert isinstance(group.memory, PoisonedMemory), "a memory that is not poisoned"
            group.memory.poison(table)
        return tables
