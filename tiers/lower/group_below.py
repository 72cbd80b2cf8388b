"""GroupBelow: one attention group's part of the tiers below."""

from collections.abc import Sequence

from kvtier.tiers.device.block_pool import Ids
from kvtier.tiers.device.runs import Row
from kvtier.tiers.lower.lower_tiers import Fetch, LowerTiers, OnFetched, Places
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tenant import OwnerNumbers


class GroupBelow:
    """The methods of `LowerTiers` that take a group, for one of them: see there."""

    def __init__(self, lower: LowerTiers, group_id: int) -> None:
        self._lower = lower
        self._group_id = group_id

    @property
    def num_slots(self) -> int:
        """Slots of host memory; 0 if nothing can be kept below."""
        return self._lower.num_slots[self._group_id]

    def find(self, names: Sequence[BlockName]) -> Places:
        return self._lower.find(self._group_id, names)

    def find_run(self, names: Sequence[BlockName]) -> Places:
        return self._lower.find_run(self._group_id, names)

    def fetch(self, blocks: NamedBlocks, on_fetched: OnFetched, found: Places | None = None) -> Fetch:
        return self._lower.fetch(self._group_id, blocks, on_fetched, found)

    def fetch_later(self, blocks: NamedBlocks, on_fetched: OnFetched) -> Fetch:
        return self._lower.fetch_later(self._group_id, blocks, on_fetched)

    def reserve(self, num_slots: int) -> list[int]:
        return self._lower.reserve(self._group_id, num_slots)

    def publish(self, slots: Ids, rows: Sequence[Row], digests: Sequence[bytes], owners: OwnerNumbers) -> None:
        self._lower.publish(self._group_id, slots, rows, digests, owners)

    def abandon(self, slots: Ids) -> None:
        self._lower.abandon(self._group_id, slots)

    def refresh(self, names: Sequence[BlockName], were_read: Sequence[bool]) -> None:
        self._lower.refresh(self._group_id, names, were_read)

    def evict_last(self, places: Places) -> None:
        self._lower.evict_last(self._group_id, places)

    def forget(self, names: Sequence[BlockName]) -> None:
        self._lower.forget(self._group_id, names)
