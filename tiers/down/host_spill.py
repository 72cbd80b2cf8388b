"""HostSpill: keeps the device's eviction end copied to host memory, ahead of need and never in anyone's way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.store.record import digest_among
from kvtier.tiers.device.runs import Row
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.group_tiers import GroupTiers
from kvtier.tiers.lower.clean_ahead import CleanAhead
from kvtier.tiers.lower.copies import PATIENCE_S, Batch, Copies, blocks_in_batch
from kvtier.tiers.lower.lower_tiers import NOWHERE
from kvtier.tiers.naming.tenant import OwnerNumbers
from kvtier.tiers.residency import Residency
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

MOST_IN_BATCH = 128  # blocks: half a millisecond's work of the owner when they have been copied …
MOST_WITH_DISK = 64  # … also where each is asked about on its way to disk
MOST_STARTED = 256  # blocks in one call: the rest in the next
MOST_BEYOND = 64  # the part of the device's slots that may be copied down before their time comes, for larger batches
MOST_IN_FLIGHT = 16  # batches: a step's worth of large blocks
BACK_OFF_S = 1.0  # after a batch that failed to leave the device; the device keeps serving


@dataclass(eq=False, slots=True)
class HostBatch(Batch):
    """Blocks on their way to host memory. The slots there are leased too."""

    group: GroupTiers
    lower_slots: Ids
    owners: OwnerNumbers


@dataclass(frozen=True, slots=True)
class CleanFront:
    """What was found when the eviction end of a pool was looked through: so many slots were clean or on their way."""

    num_slots: int = 0
    num_departures: int = 0  # of the pool by then: as many of those slots may be gone since as it has more
    num_lost: int = 0  # of the group's slots by then: if it is more, what was clean may be so no longer


class HostSpill:
    """Copies blocks down while the bus is idle: only those among the oldest `CleanAhead.num_blocks`. What is asked for
    again before that costs nothing, and host memory holds what the device does not. Owned by the cache's thread."""

    def __init__(
        self,
        residency: Residency,
        transfers: TransferEngine,
        window: CleanAhead,
        clock: Callable[[], float],
    ) -> None:
        self._groups = residency.groups
        self._lower = residency.lower
        self._most_in_batch = MOST_WITH_DISK if self._lower.saving().is_there else MOST_IN_BATCH
        self._transfers = transfers
        self._window = window
        self._clock = clock
        self.copies = Copies[HostBatch](Route.DEVICE_TO_HOST, transfers, MOST_IN_FLIGHT, clock)
        self._not_before = float("-inf")
        self._clean_fronts = {group: CleanFront() for group in self._groups}

    def spill(self, demand: Sequence[int]) -> None:
        """Start copies that are due. *demand*: for each group, slots about to be taken beyond the usual.

        Half of the window is headroom: for that the bus is left to promotions while there are any.
        """
        ahead, is_bus_free = self._window.depth, not self._transfers.num_pending(Route.HOST_TO_DEVICE)
        if not is_bus_free:
            ahead = -(-ahead // 2)
        for group, wanted in zip(self._groups, demand, strict=True):
            window = ahead + wanted + group.pool.num_reserved
            if not self._is_clean(group, window):
                self._clean(group, window, self._beyond(group) if is_bus_free else 0)
            short = ahead + wanted - group.pool.num_free
            if short > 0:  # what running requests leave will be taken at once
                self.copy_down(group, group.slots.dirty.oldest(2 * short))

    def copy_down(self, group: GroupTiers, slots: Sequence[int] | Ids) -> None:
        """Start copying those of these device slots that have no copy below, whoever leases them. A chain's front comes
        first."""
        ids = np.array(slots, np.intp)
        ids = ids[group.pool.are_named(ids)]
        ids = ids[np.isin(ids, self.copies.slots(group.pool), invert=True)]
        ids = ids[:MOST_STARTED]
        while len(ids):
            most = self._most(group, group.pool.num_slots)
            if not self._start(group, ids[:most][::-1]):
                break
            ids = ids[most:]

    @property
    def is_moving(self) -> bool:
        """Whether copies are under way that are not suspiciously late: it makes sense to wait for their slots.

        Behind one that is late none is waited for, unless some have got past it lately.
        """
        return self.copies.is_moving(self._clock() - PATIENCE_S)

    @property
    def num_dirty(self) -> int:
        """Blocks of the device that are nowhere below."""
        return sum(len(group.slots.dirty) for group in self._groups)

    def _is_clean(self, group: GroupTiers, window: int) -> bool:
        """Whether the *window* slots to be evicted next are known to be clean or on their way, without a look."""
        known = self._clean_fronts[group]
        num_gone = group.pool.order.num_departures - known.num_departures
        return known.num_slots - num_gone >= window and known.num_lost == group.slots.num_lost

    def _clean(self, group: GroupTiers, window: int, beyond: int) -> None:
        """Start copying what is dirty among so many slots at the eviction end."""
        num_lost = group.slots.num_lost
        oldest = group.pool.order.oldest(window + beyond)
        dirty = oldest[group.slots.dirty.among(oldest)]
        is_all = len(dirty) <= MOST_STARTED
        dirty = dirty[:MOST_STARTED]
        while len(dirty):
            most = self._most(group)
            if not self._start(group, dirty[:most]):
                return
            dirty = dirty[most:]
        if is_all:
            self._clean_fronts[group] = CleanFront(len(oldest), group.pool.order.num_departures, num_lost)

    def _batch_blocks(self, group: GroupTiers) -> int:
        return blocks_in_batch(group.memory.block_bytes, group.memory.num_copiers, self._most_in_batch)

    def _beyond(self, group: GroupTiers) -> int:
        """How many blocks beyond those that are due to copy with them: a batch, so that the next ones that are due are
        a batch too, and are looked for after as many allocations."""
        return min(self._batch_blocks(group), group.pool.num_slots // MOST_BEYOND)

    def _most(self, group: GroupTiers, num_lendable: int | None = None) -> int:
        """See `Copies.most`; 0 also for a while after a copy that failed."""
        if self._clock() < self._not_before:
            return 0
        return self.copies.most(group.pool, self._batch_blocks(group), num_lendable)

    def _start(self, group: GroupTiers, slots: Ids) -> bool:
        """Start one batch of these device slots' blocks, without those that have a copy below after all; whether that
        was all: not if there are no slots, the host has too few, or the lane is full."""
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
        if not self.copies.start(batch, num_bytes, _work(batch), lambda transfer: self._copied(batch, transfer)):
            self._end(batch, LaneClosed())
            return False
        return is_all

    def _copied(self, batch: HostBatch, transfer: Transfer) -> None:
        if transfer.error is not None:
            self._end(batch, transfer.error)
            return
        self._window.spilled(self._clock() - batch.submitted_at)
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
        """The device slots whose blocks have no copy below, and what is in them. The others are clean."""
        rows = group.pool.rows(slots)
        names = [name for row in rows for name in row.names]
        have = self._lower.find(group.id, names) != NOWHERE
        if not have.any():
            return slots, rows
        group.slots.dirty.remove(slots[have])
        return slots[~have], group.pool.rows(slots[~have])


def _work(batch: HostBatch) -> Callable[[], list[bytes]]:
    """What the lane does, with nothing but memory and values: copy, and take the digest of each block."""
    memory = batch.group.memory

    def copy_down() -> list[bytes]:
        lower_slots = batch.lower_slots.tolist()
        memory.to_host(batch.upper_slots.tolist(), lower_slots)
        digest = digest_among(memory.num_copiers)
        return [digest(memory.host_block(slot)) for slot in lower_slots]

    return copy_down
