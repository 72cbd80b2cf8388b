"""Spiller: the ways down together, to host memory and from there to disk."""

from collections.abc import Callable, Sequence

from kvtier.tiers.device.block_pool import Ids
from kvtier.tiers.down.clean_ahead import CleanAhead
from kvtier.tiers.down.disk_spill import DiskSpill
from kvtier.tiers.down.host_spill import HostSpill
from kvtier.tiers.lower.residency import Residency, SlotTier
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.transfer_engine import TransferEngine

PATIENCE_S = 1.0  # after which nobody waits for a copy any more


class Spiller:
    """Has blocks copied down while lanes are idle; without a host tier, or without a disk, there is no such way and its
    calls do nothing. Owned by the cache's thread."""

    def __init__(
        self,
        residency: Residency,
        memories: Sequence[BlockMemory],
        transfers: TransferEngine,
        window: CleanAhead,
        clock: Callable[[], float],
    ) -> None:
        self._residency = residency
        self._clock = clock
        host, disk = residency.host, residency.disk
        self._to_host = None if host is None else HostSpill(residency, host, memories, transfers, window, clock)
        self._to_disk = None
        if host is not None and disk is not None:
            self._to_disk = DiskSpill(residency, host, disk, memories, transfers, clock)
        self._ways = [way.copies for way in (self._to_host, self._to_disk) if way is not None]

    @property
    def num_stored(self) -> int:
        """Blocks that have been written to disk."""
        return 0 if self._to_disk is None else self._to_disk.num_stored

    def spill_device(self, demand: Sequence[int]) -> None:
        """Start copies to host that are due. *demand*: for each group, slots about to be taken beyond the usual."""
        if self._to_host is not None:
            self._to_host.spill(demand)

    def copy_down(self, group_id: int, slots: Sequence[int] | Ids) -> None:
        """Start copying those of these device slots to host that have no copy below. A chain's front comes first."""
        if self._to_host is not None:
            self._to_host.copy_down(group_id, slots)

    def spill_host(self) -> None:
        """Start copies to disk that are due."""
        if self._to_disk is not None:
            self._to_disk.spill()

    def host_is_roomy(self, demand: Sequence[int]) -> bool:
        """Whether the host could take a window of blocks, and the *demand* by group, without losing a last copy."""
        return self._to_host is None or self._to_host.has_room(demand)

    def is_moving(self) -> bool:
        """Whether copies are under way that are not suspiciously late: it makes sense to wait for their slots.

        Behind one that is late none is waited for, unless some have got past it lately.
        """
        is_moving = self._to_host is not None and self._to_host.copies.is_moving(self._clock() - PATIENCE_S)
        return is_moving or self.is_writing()

    def is_writing(self) -> bool:
        """`is_moving`, of copies to disk alone."""
        disk = self._residency.disk
        if self._to_disk is None or disk is None or disk.is_failing:
            return False
        return self._to_disk.copies.is_moving(self._clock() - PATIENCE_S)

    @property
    def is_busy(self) -> bool:
        """Whether copies down are under way."""
        return any(way.batches for way in self._ways)

    def hangs_since(self, began_at: float) -> bool:
        """Whether copies down are under way, and on each way that has some none has ended for so long, nor since
        *began_at*, that none will."""
        busy = [way for way in self._ways if way.batches]
        return bool(busy) and all(way.hangs_since(began_at) for way in busy)

    def num_dirty(self) -> int:
        """Blocks of device and host without a copy below; 0 without a disk, where nothing can be kept anyway."""
        residency = self._residency
        if residency.disk is None or residency.host is None:
            return 0
        return sum(len(dirty) for tier in (residency.device, residency.host) for dirty in tier.dirty)

    def num_leases(self, tier: SlotTier, group_id: int) -> int:
        """Leases that batches under way hold on a pool."""
        if self._to_host is None:
            return 0
        if tier is self._residency.device:
            return self._to_host.copies.num_leases(group_id)
        written = 0 if self._to_disk is None else self._to_disk.copies.num_leases(group_id)
        return written + self._to_host.num_lower_leases(group_id)
