"""HostSpill: keeps the device's eviction end copied to host memory, ahead of need and never in anyone's way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.store.record import digest_among
from kvtier.tiers.device.block_pool import Ids
from kvtier.tiers.device.runs import Row
from kvtier.tiers.lower.clean_ahead import CleanAhead
from kvtier.tiers.lower.copies import PATIENCE_S, Batch, Copies, blocks_in_batch
from kvtier.tiers.lower.lower_tiers import NOWHERE
from kvtier.tiers.naming.tenant import OwnerNumbers
from kvtier.tiers.residency import Residency
from kvtier.transfer.block_memory import BlockMemory
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

    lower_slots: Ids
    owners: OwnerNumbers


@dataclass(frozen=True, slots=True)
class CleanFront:
    """What was found when the eviction end of a pool was looked through: so many slots were clean or on their way."""

    num_slots: int = 0
    num_departures: int = 0  # of the pool by then: as many of those slots may be gone since as it has more
    num_lost: int = 0  # of the tier by then: if it has more, what was clean may be so no longer


class HostSpill:
    """Copies blocks down while the bus is idle: only those among the oldest `CleanAhead.num_blocks`. What is asked for
    again before that costs nothing, and host memory holds what the device does not. Owned by the cache's thread."""

    def __init__(
        self,
        residency: Residency,
        memories: Sequence[BlockMemory],
        transfers: TransferEngine,
        window: CleanAhead,
        clock: Callable[[], float],
    ) -> None:
        self._residency = residency
        self._device = residency.device
        self._lower = residency.lower
        self._most_in_batch = MOST_WITH_DISK if residency.lower.saving().is_there else MOST_IN_BATCH
        self._memories = memories
        self._transfers = transfers
        self._window = window
        self._clock = clock
        self.copies = Copies[HostBatch](
            Route.DEVICE_TO_HOST, residency.device, memories, transfers, MOST_IN_FLIGHT, clock
        )
        self._not_before = float("-inf")
        self._clean_fronts = [CleanFront() for _ in memories]

    def spill(self, demand: Sequence[int]) -> None:
        """Start copies that are due. *demand*: for each group, slots about to be taken beyond the usual.

        Half of the window is headroom: for that the bus is left to promotions while there are any.
        """
        ahead, is_bus_free = self._window.depth, not self._transfers.num_pending(Route.HOST_TO_DEVICE)
        if not is_bus_free:
            ahead = -(-ahead // 2)
        for group_id, wanted in enumerate(demand):
            pool = self._device.pools[group_id]
            window = ahead + wanted + pool.num_reserved
            if not self._is_clean(group_id, window):
                self._clean(group_id, window, self._beyond(group_id) if is_bus_free else 0)
            short = ahead + wanted - pool.num_free
            if short > 0:  # what running requests leave will be taken at once
                self.copy_down(group_id, self._device.dirty[group_id].oldest(2 * short))

    def copy_down(self, group_id: int, slots: Sequence[int] | Ids) -> None:
        """Start copying those of these device slots that have no copy below, whoever leases them. A chain's front comes
        first."""
        pool, ids = self._device.pools[group_id], np.array(slots, np.intp)
        ids = ids[pool.are_named(ids)]
        ids = ids[np.isin(ids, self.copies.slots(group_id), invert=True)]
        ids = ids[:MOST_STARTED]
        while len(ids):
            most = self._most(group_id, pool.num_slots)
            if not self._start(group_id, ids[:most][::-1]):
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
        return sum(map(len, self._device.dirty))

    def _is_clean(self, group_id: int, window: int) -> bool:
        """Whether the *window* slots to be evicted next are known to be clean or on their way, without a look."""
        known = self._clean_fronts[group_id]
        num_gone = self._device.pools[group_id].num_departures - known.num_departures
        return known.num_slots - num_gone >= window and known.num_lost == self._device.num_lost

    def _beyond(self, group_id: int) -> int:
        """How many blocks beyond those that are due to copy with them: a batch, so that the next ones that are due are
        a batch too, and are looked for after as many allocations."""
        return min(self._batch_blocks(group_id), self._device.pools[group_id].num_slots // MOST_BEYOND)

    def _clean(self, group_id: int, window: int, beyond: int) -> None:
        """Start copying what is dirty among so many slots at the eviction end."""
        pool, num_lost = self._device.pools[group_id], self._device.num_lost
        oldest = pool.oldest(window + beyond)
        dirty = oldest[self._device.dirty[group_id].among(oldest)]
        is_all = len(dirty) <= MOST_STARTED
        dirty = dirty[:MOST_STARTED]
        while len(dirty):
            most = self._most(group_id)
            if not self._start(group_id, dirty[:most]):
                return
            dirty = dirty[most:]
        if is_all:
            self._clean_fronts[group_id] = CleanFront(len(oldest), pool.num_departures, num_lost)

    def _batch_blocks(self, group_id: int) -> int:
        memory = self._memories[group_id]
        return blocks_in_batch(memory.block_bytes, memory.num_copiers, self._most_in_batch)

    def _most(self, group_id: int, num_lendable: int | None = None) -> int:
        """See `Copies.most`; 0 also for a while after a copy that failed."""
        if self._clock() < self._not_before:
            return 0
        return self.copies.most(group_id, self._batch_blocks(group_id), num_lendable)

    def _start(self, group_id: int, slots: Ids) -> bool:
        """Start one batch of these device slots' blocks, without those that have a copy below after all; whether that
        was all: not if there are no slots, the host has too few, or the lane is full."""
        if not len(slots):
            return False
        pool, slots, rows = self._device.pools[group_id], *self._without_copies(group_id, slots)
        if not len(slots):
            return True
        lower_slots = self._lower.reserve(group_id, len(slots))
        is_all = len(lower_slots) == len(slots)
        if not is_all:
            slots = slots[: len(lower_slots)]
            rows = pool.rows(slots)
        if not len(slots):
            return False
        batch = HostBatch(
            group_id,
            rows,
            slots,
            self._clock(),
            np.array(lower_slots, np.intp),
            self._residency.owners(group_id, slots),
        )
        if not self.copies.start(batch, self._work(batch), lambda transfer: self._copied(batch, transfer)):
            self._end(batch, LaneClosed())
            return False
        return is_all

    def _without_copies(self, group_id: int, slots: Ids) -> tuple[Ids, list[Row]]:
        """The device slots whose blocks have no copy below, and what is in them. The others are clean."""
        pool = self._device.pools[group_id]
        rows = pool.rows(slots)
        names = [name for row in rows for name in row.names]
        have = self._lower.find(group_id, names) != NOWHERE
        if not have.any():
            return slots, rows
        self._device.dirty[group_id].remove(slots[have])
        return slots[~have], pool.rows(slots[~have])

    def _work(self, batch: HostBatch) -> Callable[[], list[bytes]]:
        """What the lane does, with nothing but memory and values: copy, and take the digest of each block."""
        memory = self._memories[batch.group_id]

        def copy_down() -> list[bytes]:
            lower_slots = batch.lower_slots.tolist()
            memory.to_host(batch.upper_slots.tolist(), lower_slots)
            digest = digest_among(memory.num_copiers)
            return [digest(memory.host_block(slot)) for slot in lower_slots]

        return copy_down

    def _copied(self, batch: HostBatch, transfer: Transfer) -> None:
        if transfer.error is not None:
            self._end(batch, transfer.error)
            return
        self._window.spilled(self._clock() - batch.submitted_at)
        self.copies.end(batch)
        self._lower.publish(batch.group_id, batch.lower_slots, batch.rows, transfer.result, batch.owners)
        self._device.dirty[batch.group_id].remove(batch.upper_slots)

    def _end(self, batch: HostBatch, error: BaseException) -> None:
        self.copies.end(batch)
        self._clean_fronts[batch.group_id] = CleanFront()
        if not isinstance(error, LaneClosed):
            self._not_before = self._clock() + BACK_OFF_S
        self._lower.abandon(batch.group_id, batch.lower_slots)
