"""HostSpill: copies the device's oldest blocks to host memory, before their slots are needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.store.record import digest_among
from kvtier.tiers.device.eviction_order import Row
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.group_tiers import GroupTiers
from kvtier.tiers.lower.clean_ahead import CleanAhead
from kvtier.tiers.lower.copies import PATIENCE_S, Batch, Copies, blocks_in_batch
from kvtier.tiers.lower.lower_tiers import are_kept
from kvtier.tiers.naming.tenant import OwnerNumbers
from kvtier.tiers.residency import Residency
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

MAX_IN_BATCH = 128  # blocks: half a millisecond's work of the owner's thread when they have been copied …
MAX_WITH_DISK = 64  # … also where there is a disk: each is asked about on its way there
MAX_STARTED = 256  # blocks in one call: the rest in the next
MAX_BEYOND = 64  # a 64th of the device's slots may be copied down before they are due, for larger batches
MAX_IN_FLIGHT = 16  # batches: a step's worth of large blocks
BACK_OFF_S = 1.0  # after a batch that failed to leave the device; the device keeps serving


@dataclass(eq=False, slots=True)
class HostBatch(Batch):
    """Blocks on their way to host memory. Their slots are leased on both sides."""

    group: GroupTiers
    lower_slots: Ids
    owners: OwnerNumbers


@dataclass(frozen=True, slots=True)
class CleanFront:
    """How many slots at a pool's eviction end were clean or on their way down when it was last looked through."""

    num_slots: int = 0
    num_departures: int = 0  # of the order by then: each one since may be one of these slots
    num_lost: int = 0  # of the group's slots by then: if there are more now, clean slots may be dirty again


class HostSpill:
    """Copies blocks down while the bus is idle, only blocks among the oldest `CleanAhead.num_blocks`. A block that is
    used again before then costs nothing, and host memory holds what the device does not. What others want sooner is
    asked for (`copy_rest_down`, `copy_down`). Owned by the cache's thread.
    """

    def __init__(
        self,
        residency: Residency,
        transfers: TransferEngine,
        window: CleanAhead,
        clock: Callable[[], float],
    ) -> None:
        self._groups = residency.groups
        self._lower = residency.lower
        self._has_disk = self._lower.spill_progress().has_target
        self._max_in_batch = MAX_WITH_DISK if self._has_disk else MAX_IN_BATCH
        self._transfers = transfers
        self._window = window
        self._log = residency.spills
        self._clock = clock
        self.copies = Copies[HostBatch](Route.DEVICE_TO_HOST, transfers, MAX_IN_FLIGHT, clock)
        self._not_before = float("-inf")
        self._clean_fronts = {group: CleanFront() for group in self._groups}

    def spill(self, demand: Sequence[int]) -> None:
        """Start copies that are due. *demand*: for each group, slots about to be taken beyond the usual.

        Half of the window is headroom: it is copied only while no promotion needs the bus. More than there is room for
        below would push itself out, again and again.
        """
        ahead, is_bus_free = self._window.depth, not self._transfers.num_pending(Route.HOST_TO_DEVICE)
        if not is_bus_free:
            ahead = -(-ahead // 2)
        for group, wanted in zip(self._groups, demand, strict=True):
            limit = group.pool.num_slots if self._has_disk else group.memory.num_host_slots
            window = min(ahead + wanted + group.pool.num_reserved, limit)
            if not self._is_clean(group, window):
                beyond = self._beyond(group) if is_bus_free else 0
                self._clean(group, window, min(beyond, limit - window))
            short = ahead + wanted - group.pool.num_free
            if short > 0:  # the slots that running requests release will be taken at once
                self.copy_down(group, group.slots.dirty.oldest(2 * short))

    def copy_rest_down(self) -> None:
        """Start copying blocks that have no copy below, leased or not, the oldest first. The rest in the next call. Not
        blocks that were pushed out there: tiers below that are smaller than the device would never rest."""
        for group in self._groups:
            self.copy_down(group, group.slots.uncopied(MAX_STARTED))

    def copy_down(self, group: GroupTiers, slots: Sequence[int] | Ids) -> None:
        """Start copying the blocks in these device slots that have no copy below, leased or not. A chain's front comes
        first."""
        ids = np.array(slots, np.intp)
        ids = ids[group.pool.are_named(ids)]
        ids = ids[np.isin(ids, self.copies.slots(group.pool), invert=True)]
        ids = ids[:MAX_STARTED]
        while len(ids):
            limit = self._limit(group, group.pool.num_slots)
            if not self._start(group, ids[:limit][::-1]):
                break
            ids = ids[limit:]

    @property
    def is_moving(self) -> bool:
        """Whether copies are under way that are not suspiciously late: waiting for their slots makes sense.

        Copies behind a late one count as late, unless some have got past it lately.
        """
        return self.copies.is_moving(self._clock() - PATIENCE_S)

    @property
    def num_dirty(self) -> int:
        """Number of device blocks that have no copy below."""
        return sum(len(group.slots.dirty) for group in self._groups)

    @property
    def num_uncopied(self) -> int:
        """Of these, those that `copy_rest_down` copies."""
        return sum(len(group.slots.uncopied()) for group in self._groups)

    def _is_clean(self, group: GroupTiers, window: int) -> bool:
        """Whether the next *window* slots to evict are known to be clean or on their way, without a look at them."""
        known = self._clean_fronts[group]
        num_gone = group.pool.order.num_departures - known.num_departures
        return known.num_slots - num_gone >= window and known.num_lost == group.slots.num_lost

    def _clean(self, group: GroupTiers, window: int, beyond: int) -> None:
        """Start copying the dirty blocks among the next *window* + *beyond* slots to evict."""
        num_lost = group.slots.num_lost
        oldest = group.pool.order.oldest(window + beyond)
        dirty = oldest[group.slots.dirty.among(oldest)]
        is_all = len(dirty) <= MAX_STARTED
        dirty = dirty[:MAX_STARTED]
        while len(dirty):
            limit = self._limit(group)
            if not self._start(group, dirty[:limit]):
                return
            dirty = dirty[limit:]
        if is_all:
            self._clean_fronts[group] = CleanFront(len(oldest), group.pool.order.num_departures, num_lost)

    def _batch_blocks(self, group: GroupTiers) -> int:
        return blocks_in_batch(group.memory.block_bytes, group.memory.num_copiers, self._max_in_batch)

    def _beyond(self, group: GroupTiers) -> int:
        """How many blocks to copy beyond the ones that are due: a batch, so that the next look comes after as many
        allocations and finds a batch too."""
        return min(self._batch_blocks(group), group.pool.num_slots // MAX_BEYOND)

    def _limit(self, group: GroupTiers, num_lendable: int | None = None) -> int:
        """Most blocks of the next batch, see `Copies.max_blocks`; 0 also for a while after a copy that failed."""
        if self._clock() < self._not_before:
            return 0
        return self.copies.max_blocks(group.pool, self._batch_blocks(group), num_lendable)

    def _start(self, group: GroupTiers, slots: Ids) -> bool:
        """Start copying one batch: these device slots' blocks, but for the ones that have a copy below after all.
        Whether all were started: False if there are none, the host has too few slots, or the lane is full."""
        if not len(slots):
            return False
        slots, rows = self._without_copies(group, slots)
        if not len(slots):
            return True
        lower_slots = self._lower.reserve(group.id, len(slots))
        is_all = len(lower_slots) == len(slots)
        if not is_all:
            slots = slots[: len(lower_slots)]
            rows = group.pool.rows(slots)
        if not len(slots):
            return False
        batch = HostBatch(
            group.pool,
            rows,
            slots,
            self._clock(),
            group,
            np.array(lower_slots, np.intp),
            group.owners.of(slots),
        )
        num_bytes = len(slots) * group.memory.block_bytes
        if not self.copies.start(batch, num_bytes, _work(batch), lambda transfer: self._on_copied(batch, transfer)):
            self._end(batch, LaneClosed())
            return False
        return is_all

    def _on_copied(self, batch: HostBatch, transfer: Transfer) -> None:
        if self._log is not None:
            self._log.on_copied(Route.DEVICE_TO_HOST, batch, transfer)
        if transfer.error is not None:
            self._end(batch, transfer.error)
            return
        self._window.on_spilled(self._clock() - batch.submitted_at)
        self.copies.end(batch)
        self._lower.publish(batch.group.id, batch.lower_slots, batch.rows, transfer.result, batch.owners)
        batch.group.slots.dirty.remove(batch.upper_slots)

    def _end(self, batch: HostBatch, error: BaseException) -> None:
        self.copies.end(batch)
        self._clean_fronts[batch.group] = CleanFront()
        if not isinstance(error, LaneClosed):
            self._not_before = self._clock() + BACK_OFF_S
        self._lower.abandon(batch.group.id, batch.lower_slots)

    def _without_copies(self, group: GroupTiers, slots: Ids) -> tuple[Ids, list[Row]]:
        """The device slots whose blocks have no copy below, and their blocks. The other slots are marked clean."""
        rows = group.pool.rows(slots)
        names = [name for row in rows for name in row.names]
        have = are_kept(self._lower.find(group.id, names))
        if not have.any():
            return slots, rows
        group.slots.dirty.remove(slots[have])
        return slots[~have], group.pool.rows(slots[~have])


def _work(batch: HostBatch) -> Callable[[], list[bytes]]:
    """The lane's work, with nothing but memory and values: copy, and take the digest of each block."""
    memory = batch.group.memory

    def copy_down() -> list[bytes]:
        lower_slots = batch.lower_slots.tolist()
        memory.to_host(batch.upper_slots.tolist(), lower_slots)
        digest = digest_among(memory.num_copiers)
        return [digest(memory.host_block(slot)) for slot in lower_slots]

    return copy_down
