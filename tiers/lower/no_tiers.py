"""NoTiers: nothing is below the device."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.runs import Row
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.lower.lower_tiers import NOWHERE, Lost, LowerStatistics, Places, Saving, Tell
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tenant import NOBODY, OwnerNumbers
from kvtier.tiers.naming.tier import Reason
from kvtier.transfer.lane_speed import LaneSpeed


class NoFetch:
    """Nothing of it ever comes."""

    def __init__(self, group_id: int, names: Sequence[BlockName]) -> None:
        self.group_id = group_id
        self.slots = _nowhere(names)
        self.failures: Mapping[int, Reason] = dict.fromkeys(range(len(names)), Reason.NEVER_SEEN)

    def digest(self, place: int) -> bytes:
        raise KeyError(f"block {place}: nothing is below the device")

    def tenant(self, place: int) -> bytes:
        return NOBODY

    def release(self, places: Sequence[int] | npt.NDArray[np.int64]) -> None:
        pass

    def time_out(self) -> None:
        pass


class NoTiers:
    """See `LowerTiers`. It has no slot and finds nothing."""

    num_changes = 0
    epoch = 0
    is_known = True
    is_in_order = True
    is_making_room = False

    def __init__(self, num_groups: int) -> None:
        self.num_slots = [0] * num_groups
        self._speed = LaneSpeed()
        self._untold: list[tuple[NoFetch, Tell]] = []

    def find(self, group_id: int, names: Sequence[BlockName]) -> Places:
        return _nowhere(names)

    def find_run(self, group_id: int, names: Sequence[BlockName]) -> Places:
        return _nowhere(())

    def fetch(
        self,
        group_id: int,
        blocks: NamedBlocks,
        tell: Tell,
        found: Places | None = None,
    ) -> NoFetch:
        fetch = NoFetch(group_id, blocks.names)
        self._untold.append((fetch, tell))
        return fetch

    def fetch_later(self, group_id: int, blocks: NamedBlocks, tell: Tell) -> NoFetch:
        return self.fetch(group_id, blocks, tell)

    def reserve(self, group_id: int, num_slots: int) -> list[int]:
        return []

    def publish(
        self, group_id: int, slots: Ids, rows: Sequence[Row], digests: Sequence[bytes], owners: OwnerNumbers
    ) -> None:
        assert not len(slots), "a slot that was not reserved"

    def abandon(self, group_id: int, slots: Ids) -> None:
        assert not len(slots), "a slot that was not reserved"

    def refresh(self, group_id: int, names: Sequence[BlockName], were_read: Sequence[bool]) -> None:
        pass

    def keep(self, group_id: int, places: Places) -> None:
        pass

    def forget(self, group_id: int, names: Sequence[BlockName]) -> None:
        pass

    def clear(self) -> bool:
        return True

    def spill(self) -> None:
        pass

    def poll(self) -> None:
        untold, self._untold = self._untold, []
        for fetch, tell in untold:
            for place, reason in fetch.failures.items():
                tell(fetch, place, reason)

    def take_lost(self) -> Sequence[Lost]:
        return ()

    def read_speed(self) -> LaneSpeed:
        return self._speed

    def queued_read_bytes(self) -> int:
        return 0

    def saving(self) -> Saving:
        return Saving()

    def statistics(self) -> LowerStatistics:
        return LowerStatistics()

    def check(self) -> None:
        pass


def _nowhere(names: Sequence[BlockName]) -> Places:
    return np.full(len(names), NOWHERE, np.int32)
