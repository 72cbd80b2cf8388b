"""Drain: copies all blocks to the lower tiers before the process ends."""

import time
from collections.abc import Callable, Sequence

from kvtier.tiers.down.host_spill import HostSpill
from kvtier.tiers.lower.breaker import HUNG_S
from kvtier.tiers.lower.lower_tiers import LowerTiers, SpillProgress
from kvtier.tiers.residency import GroupTiers
from kvtier.transfer.transfer_engine import TransferEngine


class Drain:
    """Copies all blocks to lower tiers, even if no slot is needed, so that other processes find them there.

    Owned by the cache's thread.
    """

    def __init__(
        self,
        groups: Sequence[GroupTiers],
        host_spill: HostSpill,
        lower: LowerTiers,
        transfers: TransferEngine,
        wait: Callable[[float], None],
        is_promoting: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """Prepare to copy the blocks of all attention groups. No copy starts yet.

        *wait* takes a time limit in seconds; it waits for a transfer to finish and processes it. *is_promoting* returns
        whether any promotion is in flight.
        """
        self._groups = groups
        self._host_spill = host_spill
        self._lower = lower
        self._transfers = transfers
        self._wait = wait
        self._is_promoting = is_promoting
        self._clock = clock

    def flush(self, timeout_s: float, progress: Callable[[int], None] = lambda num_left: None) -> int:
        """Copy all blocks to disk, so that the cache is warm after a restart.

        Does nothing without a disk. Waits up to *timeout_s*, but gives up earlier if copies hang or host slots are not
        released.

        Args:
            timeout_s: Time limit.
            progress: Called with the number of blocks that are left.

        Returns:
            The number of blocks that were not copied.
        """
        below = self._lower.status.spill_progress()
        if not below.has_target:
            return 0
        began_at = self._clock()
        deadline = began_at + timeout_s
        everything = [group.pool.num_slots for group in self._groups]
        # Each block is written once. Otherwise a disk smaller than the tiers above would evict blocks just written.
        stop_at = below.num_done + below.num_left + self._host_spill.num_dirty
        min_num_tokens, moved_at = stop_at, began_at
        while (num_left := below.num_left + self._host_spill.num_dirty) and below.num_done < stop_at:
            if num_left < min_num_tokens or self._host_spill.copies.batches or below.is_busy:
                min_num_tokens, moved_at = min(num_left, min_num_tokens), self._clock()
            if self._clock() >= deadline or not below.is_possible or self._hangs_since(began_at, below):
                break
            if self._clock() - moved_at > HUNG_S:
                break
            progress(num_left)
            self._lower.hints.spill()
            self._host_spill.spill(everything)
            if self._transfers.in_flight:
                self._wait(0.05)
            else:
                time.sleep(0.01)  # copies pause for a while after a failure
                self._wait(0.0)
            below = self._lower.status.spill_progress()
        while self._host_spill.copies.batches or below.is_busy:
            if self._clock() >= deadline or self._hangs_since(began_at, below):
                break
            self._wait(0.05)
            below = self._lower.status.spill_progress()
        return num_left

    def spill_rest(self) -> int:
        """Start to copy dirty blocks (those without a copy below) from the device to host memory, and then to disk.

        Leased blocks are copied too. Each call starts some copies. Returns the number of blocks that are left,
        including those in flight; 0 if there are no lower tiers.
        """
        if not all(self._lower.status.num_slots):
            return 0
        if not self._is_promoting():
            self._host_spill.spill_all()
            self._lower.hints.spill()
        return self._host_spill.num_uncopied + self._lower.status.spill_progress().num_left

    def _hangs_since(self, began_at: float, below: SpillProgress) -> bool:
        """Return whether spills are in flight but none has ended for `HUNG_S`, not counting time before *began_at*."""
        copies = self._host_spill.copies
        ended_at = [copies.ended_at] * bool(copies.batches) + [below.ended_at] * below.is_busy
        return bool(ended_at) and max(began_at, *ended_at) < self._clock() - HUNG_S
