"""HostSpill: copies the oldest device blocks to host memory before their slots are needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.store.record import digest_for_threads
from kvtier.tiers.device.eviction_order import NamedSpan, names_in
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.lower.copies import HUNG_COPY_S, CleanAhead, Copies, CopyBatch, blocks_in_batch
from kvtier.tiers.lower.lower_tiers import are_kept
from kvtier.tiers.naming.named_blocks import OwnerNumbers
from kvtier.tiers.residency import GroupTiers, Residency
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

MAX_IN_BATCH = 128  # blocks per batch; publishing them takes half a millisecond of the owner's thread
MAX_WITH_DISK = 64  # the same limit with a disk, because each block is then also looked up
MAX_STARTED = 256  # blocks started per call; the rest follows in the next call
MAX_BEYOND = 64  # 1/64 of the device slots may be copied before they are due, for larger batches
MAX_IN_FLIGHT = 16  # batches per group: one engine step's worth of large blocks
BACK_OFF_S = 1.0  # pause after a failed copy from the device, which keeps serving requests


@dataclass(eq=False, slots=True)
class HostBatch(CopyBatch):
    """Blocks being copied to host memory. Their device and host slots are leased."""

    group: GroupTiers
    lower_slots: Ids
    owners: OwnerNumbers

    def copy_down(self) -> list[bytes]:
        """Copy the blocks to the host slots and return their digests. Called by a copy thread."""
        memory, lower_slots = self.group.memory, self.lower_slots.tolist()
        memory.to_host(self.source_slots.tolist(), lower_slots)
        digest = digest_for_threads(memory.num_copiers)
        return [digest(memory.host_block(slot)) for slot in lower_slots]


@dataclass(frozen=True, slots=True)
class CleanFront:
    """The result of the last search for dirty blocks: the *num_slots* oldest slots are clean or being copied.

    No new search is needed until too few of these slots are left.
    """

    num_slots: int = 0
    # `EvictionOrder.num_departures` at the last search. Each slot that has left the order since may be one of these.
    num_departures: int = 0
    num_lost: int = 0  # `GroupSlots.num_lost` at the last search; if it has grown, clean slots may be dirty again


class HostSpill:
    """Copies device blocks to host memory shortly before they are evicted.

    Only blocks in the *window* are copied: the blocks that will be evicted next. `CleanAhead` sets their number. A
    block that is used again before it reaches the window is not copied, so host memory mostly holds blocks that the
    device does not. Callers that need copies sooner use `spill_all` and `copy_down`. A block is *dirty* until it has
    been copied, then *clean*. Owned by the cache's thread.
    """

    def __init__(
        self,
        residency: Residency,
        transfers: TransferEngine,
        windows: Sequence[CleanAhead],
        clock: Callable[[], float],
    ) -> None:
        """Create a spill without copies. *windows* has the window of each attention group."""
        self._groups = residency.groups
        self._lower = residency.lower
        self._has_disk = self._lower.status.spill_progress().has_target
        max_in_batch = MAX_WITH_DISK if self._has_disk else MAX_IN_BATCH
        self._batch_blocks = {
            group: blocks_in_batch(group.memory.block_bytes, group.memory.num_copiers, max_in_batch)
            for group in self._groups
        }
        self._transfers = transfers
        self._windows = windows
        self._log = residency.spills
        self._clock = clock
        self.copies = Copies[HostBatch](Route.DEVICE_TO_HOST, transfers, MAX_IN_FLIGHT, clock)
        self._not_before = float("-inf")
        self._clean_fronts = {group: CleanFront() for group in self._groups}

    def spill(self, demand: Sequence[int]) -> None:
        """Start to copy the dirty blocks in the window: the device blocks that will be evicted next.

        *demand* is how many slots of each attention group will soon be taken. The window has `CleanAhead.depth` blocks
        plus this number. While blocks are copied to the device over the same bus, half the depth is used. Without a
        disk, the window has at most as many blocks as host memory can hold.
        """
        is_bus_free = not self._transfers.num_pending(Route.HOST_TO_DEVICE)
        for group, wanted in zip(self._groups, demand, strict=True):
            ahead = self._windows[group.id].depth
            if not is_bus_free:
                ahead = -(-ahead // 2)
            limit = group.pool.num_slots if self._has_disk else group.memory.num_host_slots
            window = min(ahead + wanted + group.pool.num_reserved, limit)
            # Copy up to a batch before it is due. So the window stays clean until a whole batch is due again.
            beyond = min(self._batch_blocks[group], group.pool.num_slots // MAX_BEYOND) if is_bus_free else 0
            self._clean(group, window, min(beyond, limit - window))
            short = ahead + wanted - group.pool.num_free
            if short > 0:  # slots that running requests release will be reused at once, so copy those blocks too
                self.copy_down(group, group.slots.dirty.oldest(2 * short))

    def spill_all(self) -> None:
        """Start to copy the blocks that have been dirty longest, leased or not. Call again for the rest.

        Blocks that the lower tiers have evicted for lack of room are skipped. Otherwise, if the lower tiers are smaller
        than the device, copying would never end.
        """
        for group in self._groups:
            self.copy_down(group, group.slots.uncopied(MAX_STARTED))

    def copy_down(self, group: GroupTiers, slots: Sequence[int] | Ids) -> None:
        """Start to copy the blocks in *slots* to host memory, except those that are there or on disk already.

        The slots may be leased. The blocks of a prefix must be in the order of the prompt.
        """
        ids = np.array(slots, np.intp)
        ids = ids[group.pool.are_named(ids)]
        ids = self.copies.without(group.pool, ids)[:MAX_STARTED]
        while len(ids):
            limit = self._limit(group, group.pool.num_slots)
            if not self._start(group, ids[:limit][::-1]):
                break
            ids = ids[limit:]

    @property
    def is_making_progress(self) -> bool:
        """True if copies to host memory are in flight and do not hang, so that it makes sense to wait for their slots.

        `Copies.is_making_progress` says when copies hang; the time limit is `HUNG_COPY_S`.
        """
        return self.copies.is_making_progress(self._clock() - HUNG_COPY_S)

    @property
    def num_dirty(self) -> int:
        """Number of device blocks that have no copy below."""
        return sum(len(group.slots.dirty) for group in self._groups)

    @property
    def num_uncopied(self) -> int:
        """Number of dirty device blocks that `spill_all` would copy."""
        return sum(len(group.slots.uncopied()) for group in self._groups)

    def _clean(self, group: GroupTiers, window: int, beyond: int) -> None:
        """Start to copy the dirty blocks among the *window* + *beyond* slots that will be evicted next.

        Does nothing if the first *window* of these slots are known to be clean or being copied.
        """
        known, num_lost = self._clean_fronts[group], group.slots.num_lost
        num_gone = group.pool.order.num_departures - known.num_departures
        if known.num_slots - num_gone >= window and known.num_lost == num_lost:
            return
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

    def _limit(self, group: GroupTiers, num_lendable: int | None = None) -> int:
        if self._clock() < self._not_before:  # a copy has failed within the last `BACK_OFF_S`
            return 0
        return self.copies.max_blocks(group.pool, self._batch_blocks[group], num_lendable)

    def _start(self, group: GroupTiers, slots: Ids) -> bool:
        """Start to copy the blocks in *slots* as one batch, except blocks that already have a lower copy.

        Returns False if *slots* is empty, the host has too few slots for all blocks, or the lane (copy queue) is full.
        """
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
        if not self.copies.start(batch, num_bytes, batch.copy_down, lambda transfer: self._on_copied(batch, transfer)):
            self._end(batch, LaneClosed())
            return False
        return is_all

    def _on_copied(self, batch: HostBatch, transfer: Transfer) -> None:
        """End a batch whose copy has finished. Publish its blocks in host memory unless the copy failed."""
        if self._log is not None:
            self._log.on_copied(Route.DEVICE_TO_HOST, batch, transfer)
        if transfer.error is not None:
            self._end(batch, transfer.error)
            return
        self._windows[batch.group.id].on_spilled(self._clock() - batch.submitted_at)
        self.copies.end(batch)
        self._lower.publish(batch.group.id, batch.lower_slots, batch.rows, transfer.result, batch.owners)
        batch.group.slots.dirty.remove(batch.source_slots)

    def _end(self, batch: HostBatch, error: BaseException) -> None:
        self.copies.end(batch)
        self._clean_fronts[batch.group] = CleanFront()
        if not isinstance(error, LaneClosed):
            self._not_before = self._clock() + BACK_OFF_S
        self._lower.abandon(batch.group.id, batch.lower_slots)

    def _without_copies(self, group: GroupTiers, slots: Ids) -> tuple[Ids, list[NamedSpan]]:
        """Return the slots whose blocks are neither in host memory nor on disk, with names. Mark the others clean."""
        rows = group.pool.rows(slots)
        have = are_kept(self._lower.find(group.id, names_in(rows)))
        if not have.any():
            return slots, rows
        group.slots.dirty.remove(slots[have])
        return slots[~have], group.pool.rows(slots[~have])
