"""NoTiers: the implementation of `LowerTiers` for a configuration without tiers below the device."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.lower.lower_tiers import (
    NOT_CLEARING,
    NOWHERE,
    Lost,
    LowerHints,
    LowerStatistics,
    OnFetched,
    Places,
    ReadPriority,
    SpillProgress,
)
from kvtier.tiers.lower.purge import NothingPurged, PurgeOrder
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import NO_TENANT, NamedBlocks, OwnerNumbers
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.transfer.lane import LaneSpeed


class NoFetch:
    """A fetch in which every block fails, because there is no tier to fetch it from; implements `Fetch`."""

    def __init__(self, group_id: int, names: Sequence[BlockName]) -> None:
        self.group_id = group_id
        self.slots = _nowhere(names)
        self.failures: Mapping[int, Reason] = dict.fromkeys(range(len(names)), Reason.NEVER_SEEN)

    def digest(self, place: int) -> bytes:
        raise KeyError(f"block {place} has no digest: there is no tier below the device")

    def tenant(self, place: int) -> bytes:
        return NO_TENANT

    def release(self, places: Sequence[int] | npt.NDArray[np.int64]) -> None:
        pass

    def time_out(self) -> None:
        pass


class NoStatus:
    """The status of `NoTiers`, which has no slots and no blocks; implements `LowerStatus`."""

    host_bytes = 0
    num_changes = 0
    epoch = 0
    is_indexed = True
    is_readable = True
    is_making_room = False
    clearing = NOT_CLEARING

    def __init__(self, num_groups: int) -> None:
        self.num_slots = [0] * num_groups
        self._speed = LaneSpeed()

    def read_speed(self, tier: Tier) -> LaneSpeed:
        return self._speed

    def queued_read_bytes(self, tier: Tier) -> int:
        return 0

    def spill_progress(self) -> SpillProgress:
        return SpillProgress()

    def statistics(self) -> LowerStatistics:
        return LowerStatistics()

    def check(self) -> None:
        pass


class NoTiers:
    """The lower tiers if only the device holds blocks: every lookup is a miss; implements `LowerTiers`."""

    def __init__(self, num_groups: int) -> None:
        self.status = NoStatus(num_groups)
        self.hints = LowerHints()
        self._untold: list[tuple[NoFetch, OnFetched]] = []

    def find(self, group_id: int, names: Sequence[BlockName]) -> Places:
        return _nowhere(names)

    def find_run(self, group_id: int, names: Sequence[BlockName]) -> Places:
        return _nowhere(())

    def fetch(
        self,
        group_id: int,
        blocks: NamedBlocks,
        on_fetched: OnFetched,
        found: Places | None = None,
        priority: ReadPriority = ReadPriority.NOW,
    ) -> NoFetch:
        fetch = NoFetch(group_id, blocks.names)
        self._untold.append((fetch, on_fetched))
        return fetch

    def reserve(self, group_id: int, num_slots: int) -> list[int]:
        return []

    def publish(
        self, group_id: int, slots: Ids, rows: Sequence[NamedSpan], digests: Sequence[bytes], owners: OwnerNumbers
    ) -> None:
        assert not len(slots), "a slot that was not reserved"

    def abandon(self, group_id: int, slots: Ids) -> None:
        assert not len(slots), "a slot that was not reserved"

    def refresh(self, group_id: int, names: Sequence[BlockName], were_read: Sequence[bool]) -> None:
        pass

    def forget(self, group_id: int, names: Sequence[BlockName]) -> None:
        pass

    def clear(self) -> bool:
        return True

    def purge(self, order: PurgeOrder) -> NothingPurged:
        return NothingPurged()

    def poll(self) -> None:
        untold, self._untold = self._untold, []
        for fetch, on_fetched in untold:
            for place, reason in fetch.failures.items():
                on_fetched(fetch, place, reason)

    def pop_lost(self) -> Sequence[Lost]:
        return ()


def _nowhere(names: Sequence[BlockName]) -> Places:
    return np.full(len(names), NOWHERE, np.int32)
