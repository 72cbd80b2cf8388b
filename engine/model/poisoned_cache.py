"""PoisonedCache, for debugging: a cache whose slots hold NaN until KV is computed or copied into them."""

from collections.abc import Sequence

from kvtier.tiers.cache import TieredCache
from kvtier.tiers.up.promotion import Tables
from kvtier.transfer.poisoned_memory import PoisonedMemory


class PoisonedCache(TieredCache):
    """A `TieredCache` that fills every newly allocated slot with NaN, to make bugs visible.

    A step that reads a wrong slot, or reads a slot before its KV is complete, computes NaN.
    """

    def allocate(self, num_slots: Sequence[int]) -> Tables | None:
        tables = super().allocate(num_slots)
        for group, table in zip(self.residency.groups, tables or (), strict=bool(tables)):
            assert isinstance(group.memory, PoisonedMemory), "memory is not poisoned"
            group.memory.poison(table)
        return tables
