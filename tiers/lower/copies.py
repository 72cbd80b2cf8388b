"""Copies: the batches of blocks that are under way down one route, and whether they get on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.device.eviction_order import Row
from kvtier.tiers.device.slot_ids import NOTHING, Ids
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.lane import Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

BATCH_BYTES = 8 << 20
PATIENCE_S = 1.0  # after which nothing waits for the slots of a copy down any more


def blocks_in_batch(block_bytes: int, num_copiers: int, limit: int, batch_bytes: int = BATCH_BYTES) -> int:
    """How many blocks to copy in one go, at most *limit*: about so many bytes for each copier."""
    return min(max(1, batch_bytes * num_copiers // block_bytes), limit)


@dataclass(eq=False, slots=True)
class Batch:
    """Blocks of one group on their way down, in the order in which they should be evicted below.

    The slots of *upper* that they are copied from are leased.
    """

    upper: BlockPool
    rows: Sequence[Row]
    upper_slots: Ids
    submitted_at: float
    names: Sequence[BlockName] = field(init=False)

    def __post_init__(self) -> None:
        self.names = [name for row in self.rows for name in row.names]


AnyBatch = TypeVar("AnyBatch", bound=Batch)


class Copies(Generic[AnyBatch]):
    """The batches under way on one route, and their leases on the slots that they are copied from.

    Owned by the tiers' thread.
    """

    def __init__(
        self,
        route: Route,
        transfers: TransferEngine,
        max_in_flight: int,
        clock: Callable[[], float],
    ) -> None:
        """*max_in_flight*: batches of a group under way at most."""
        self._route = route
        self._transfers = transfers
        self._max_in_flight = max_in_flight
        self._clock = clock
        self.ended_at = float("-inf")  # when a batch ended last
        self.batches: list[AnyBatch] = []

    def start(
        self, batch: AnyBatch, num_bytes: int, work: Callable[[], object], deliver: Callable[[Transfer], None]
    ) -> bool:
        """Lease the batch's slots and hand *work* to the lane. False if the lane is full: the caller ends the batch."""
        batch.upper.lend(batch.upper_slots)
        self.batches.append(batch)
        return self._transfers.submit(self._route, work, num_bytes, deliver, len(batch.upper_slots))

    def end(self, batch: AnyBatch) -> None:
        """End the leases of a batch, whatever became of it: its slots go back to where they were in the order."""
        self.batches.remove(batch)
        self.ended_at = self._clock()
        batch.upper.put_back(batch.upper_slots)

    def max_blocks(self, upper: BlockPool, batch_blocks: int, num_lendable: int | None = None) -> int:
        """How many blocks the next batch from this pool may have; 0 if no further batch may start.

        A batch leases its source: never more than a quarter of *num_lendable* slots, by default of those that are free,
        so that allocations find the rest.
        """
        under_way = [batch for batch in self.batches if batch.upper is upper]
        if len(under_way) >= self._max_in_flight:
            return 0
        num_lent = sum(len(batch.upper_slots) for batch in under_way)
        if num_lendable is None:
            num_lendable = upper.num_free + num_lent
        limit = min(batch_blocks, num_lendable // 4 - num_lent)
        return max(limit, 0 if under_way else 1)

    def slots(self, upper: BlockPool) -> Ids:
        """The slots of the pool that batches are copied from."""
        return np.concatenate([NOTHING, *(batch.upper_slots for batch in self.batches if batch.upper is upper)])

    def num_leases(self, upper: BlockPool) -> int:
        """Leases that the batches hold on the pool."""
        return sum(len(batch.upper_slots) for batch in self.batches if batch.upper is upper)

    def under_way_since(self, before: float) -> list[AnyBatch]:
        """The batches that were handed over before then and have not ended; none while that is not known of all."""
        if self._transfers.has_finished:
            return []
        return [batch for batch in self.batches if batch.submitted_at < before]

    def is_moving(self, since: float) -> bool:
        """Whether batches are under way and get on.

        They do if the oldest began after *since*, or since then another has begun and one has ended.
        """
        submitted = [batch.submitted_at for batch in self.batches]
        return bool(submitted) and (min(submitted) > since or (max(submitted) > since and self.ended_at > since))
