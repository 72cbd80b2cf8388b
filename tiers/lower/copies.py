"""Copies: batches of blocks that are being copied to a lower tier, with leases on their source slots.

`CleanAhead` determines how many blocks to copy before their slots are needed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.device.eviction_order import NamedSpan, names_in
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.lane import Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

BATCH_BYTES = 8 << 20  # default size of a batch, per copier
HUNG_COPY_S = 1.0  # after this long without progress, callers stop waiting for the slots of a copy
RATE_MEMORY_S = 2.0  # time constant of the averaged allocation rate
GRAIN_S = 0.02  # blocks allocated within this time count as allocated at once
HEADROOM = 2.0  # length of the window of `CleanAhead`, as a multiple of the blocks allocated during one copy


def blocks_in_batch(block_bytes: int, num_copiers: int, limit: int, batch_bytes: int = BATCH_BYTES) -> int:
    """Return how many blocks to copy at once: about *batch_bytes* per copier, at most *limit* blocks."""
    return min(max(1, batch_bytes * num_copiers // block_bytes), limit)


@dataclass(eq=False, slots=True)
class CopyBatch:
    """A batch of one attention group's blocks being copied down, in the order in which the lower tier evicts them.

    The batch holds a lease on each of *source_slots* until it ends.
    """

    upper: BlockPool  # the pool of the source slots
    rows: Sequence[NamedSpan]  # the blocks, in rows of consecutive ones
    source_slots: Ids
    submitted_at: float  # monotonic seconds
    names: Sequence[BlockName] = field(init=False)

    def __post_init__(self) -> None:
        self.names = names_in(self.rows)


AnyBatch = TypeVar("AnyBatch", bound=CopyBatch)


class Copies(Generic[AnyBatch]):
    """The batches in flight on one route, for example from device to host memory, which lease their source slots.

    The number of blocks in flight is limited, so that allocations always find free slots. Owned by the tiers' thread.
    """

    def __init__(
        self,
        route: Route,
        transfers: TransferEngine,
        max_in_flight: int,
        clock: Callable[[], float],
    ) -> None:
        """Begin without a batch in flight. *max_in_flight* limits the batches in flight per attention group.

        *route* says from which memory to which the blocks are copied.
        """
        self._route = route
        self._transfers = transfers
        self._max_in_flight = max_in_flight
        self._clock = clock
        self.ended_at = float("-inf")  # when the last batch ended
        self.batches: list[AnyBatch] = []

    def start(
        self, batch: AnyBatch, num_bytes: int, work: Callable[[], object], deliver: Callable[[Transfer], None]
    ) -> bool:
        """Lease the batch's source slots and submit *work* to the route's lane (copy queue).

        *deliver* is called with the outcome, in the tiers' thread.

        Returns:
            False if the lane is full. The caller must then call `end` for the batch.
        """
        batch.upper.lend(batch.source_slots)
        self.batches.append(batch)
        return self._transfers.submit(self._route, work, num_bytes, deliver, len(batch.source_slots))

    def end(self, batch: AnyBatch) -> None:
        """Release a batch's leases, whether it succeeded or not, so that its source slots can be evicted."""
        self.batches.remove(batch)
        self.ended_at = self._clock()
        batch.upper.put_back(batch.source_slots)

    def max_blocks(self, upper: BlockPool, batch_blocks: int, num_lendable: int | None = None) -> int:
        """Return how many blocks the next batch from the pool *upper* may have; 0 if no batch may start now.

        All batches together may lease a quarter of *num_lendable* slots, so that allocations can use the rest. By
        default, *num_lendable* is the number of slots that are free or leased by batches. If no batch is in flight, one
        block is always allowed.
        """
        under_way = [batch for batch in self.batches if batch.upper is upper]
        if len(under_way) >= self._max_in_flight:
            return 0
        num_lent = sum(len(batch.source_slots) for batch in under_way)
        if num_lendable is None:
            num_lendable = upper.num_free + num_lent
        limit = min(batch_blocks, num_lendable // 4 - num_lent)
        return max(limit, 0 if under_way else 1)

    def without(self, upper: BlockPool, slots: Ids) -> Ids:
        """Return those of *slots* (of the pool *upper*) from which no batch is being copied, in the same order."""
        copying = [batch.source_slots for batch in self.batches if batch.upper is upper]
        if not copying:
            return slots
        kept: Ids = slots[np.isin(slots, np.concatenate(copying), invert=True)]
        return kept

    def num_leases(self, upper: BlockPool) -> int:
        """Return how many leases the batches hold on slots of the pool *upper*."""
        return sum(len(batch.source_slots) for batch in self.batches if batch.upper is upper)

    def stalled_since(self, before: float) -> list[AnyBatch]:
        """Return the batches submitted before *before* that have not ended.

        Returns an empty list while finished transfers wait to be processed, because some batches may have ended.
        """
        if self._transfers.has_undelivered:
            return []
        return [batch for batch in self.batches if batch.submitted_at < before]

    def is_making_progress(self, since: float) -> bool:
        """Return whether any batch is in flight and the lane (copy queue) does not hang.

        The lane counts as hung if a batch has been in flight since before the time *since*, unless after that time
        another batch in flight was submitted and some batch ended.
        """
        submitted = [batch.submitted_at for batch in self.batches]
        return bool(submitted) and (min(submitted) > since or (max(submitted) > since and self.ended_at > since))


class CleanAhead:
    """The length of a pool's window: how many of the blocks to be evicted next should be clean.

    A block is clean once it has been copied to a lower tier. The window is longer if more blocks are allocated per
    second, and if a spill (a copy down) takes longer. Both are measured.
    """

    def __init__(self, min_blocks: int, max_blocks: int, clock: Callable[[], float]) -> None:
        self._minimum = min_blocks
        self._limit = max_blocks
        self._clock = clock
        self._rate = 0.0  # blocks per second
        self._rate_at = clock()
        self._num_new = 0  # blocks allocated since `_rate_at`
        self._spill_s = 0.0

    def on_allocated(self, num_blocks: int) -> None:
        """Record that blocks were allocated from the pool."""
        if self._clock() - self._rate_at >= GRAIN_S:
            self._rate_now()
        self._num_new += num_blocks

    def on_spilled(self, seconds: float) -> None:
        """Record how long a spill took, from its submission until its outcome was processed."""
        self._spill_s = seconds if self._spill_s == 0 else 0.8 * self._spill_s + 0.2 * seconds

    @property
    def num_blocks(self) -> int:
        """Current length of the window: how many of the blocks to be evicted next should be copied down by now."""
        if self._spill_s == 0:
            return min(self._limit, self._minimum)
        return min(self._limit, max(self._minimum, math.ceil(HEADROOM * self._rate_now() * self._spill_s)))

    @property
    def depth(self) -> int:
        """Number of slots that should be free or hold clean blocks: the larger of `num_blocks` and *min_blocks*.

        In a small pool, *max_blocks* may limit `num_blocks` to fewer than *min_blocks*.
        """
        return max(self._minimum, self.num_blocks)

    def _rate_now(self) -> float:
        now = self._clock()
        taken = self._rate + self._num_new / RATE_MEMORY_S
        self._rate = taken * math.exp((self._rate_at - now) / RATE_MEMORY_S)
        self._rate_at, self._num_new = now, 0
        return self._rate
