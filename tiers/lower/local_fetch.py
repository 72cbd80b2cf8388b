"""LocalFetch: blocks that are leased in this process's host memory, or on their way to it."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.cold_reads import ColdReads
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.lower.lower_tiers import OnFetched, Places
from kvtier.tiers.lower.reads import BlockRead
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tenant import OwnerNumbers, number_of
from kvtier.tiers.naming.tier import Reason, Tier


class LocalFetch:
    """See `Fetch`. `lease` leases what is in host memory, `read` has the rest read. Owned by the tiers' thread."""

    def __init__(
        self,
        group_id: int,
        blocks: NamedBlocks,
        index: LowerIndex,
        cold_reads: ColdReads,
        on_fetched: OnFetched,
        on_come: Callable[["LocalFetch", int, Reason | None], None],
        on_ended: Callable[["LocalFetch"], None],
    ) -> None:
        """*on_fetched* is the caller's. *on_come* is called for each block that was read or could not be, *on_ended*
        when the fetch leases nothing any more and waits for nothing."""
        self.group_id = group_id
        self.slots: Places = np.full(len(blocks.parents), ABSENT, np.int32)
        self.failures: dict[int, Reason] = {}
        self.on_fetched = on_fetched
        self._blocks = blocks
        self._index = index
        self._pool = index.host[group_id].pool
        self._cold_reads = cold_reads
        self._on_come = on_come
        self._on_ended = on_ended
        self._reads: dict[int, BlockRead] = {}  # under way, by place
        self._were_read: dict[int, BlockRead] = {}  # leased, by place
        self._num_leased = 0

    @property
    def is_reading(self) -> bool:
        """Whether some of its blocks have still to come."""
        return bool(self._reads)

    @property
    def num_leased(self) -> int:
        """Blocks that have come and were not released."""
        return self._num_leased

    def lease(self, slots: Places) -> None:
        """Lease what is in host memory already: block i in slot i, ABSENT for the others."""
        self.slots[:] = slots
        there = slots[slots != ABSENT]
        self._num_leased = len(there)
        self._pool.lease(there)

    def read(self, now: bool) -> None:
        """Have the blocks that are not leased read; *now*: before those of all that may come later."""
        places = np.flatnonzero(self.slots == ABSENT)
        self._reads = self._cold_reads.join(self.group_id, self._blocks, places, self, now)
        if len(self._reads) < len(places):
            for place in places.tolist():
                if place not in self._reads:
                    self.fail(place, Reason.EVICTED_FROM_HOST)

    def on_landed(self, place: int, block_read: BlockRead, failure: Reason | None) -> None:
        """Lease a block that has been read, or note why it never will be."""
        del self._reads[place]
        if failure is None and block_read.host_slot is not None:
            self._pool.lease([block_read.host_slot])
            self.slots[place] = block_read.host_slot
            self._were_read[place] = block_read
            self._num_leased += 1
            self._on_come(self, place, None)
        else:
            self.fail(place, failure or Reason.FAILED)

    def fail(self, place: int, reason: Reason) -> None:
        """Note that a block will not come."""
        self.failures[place] = reason
        self._on_come(self, place, reason)

    def digest(self, place: int) -> bytes:
        was_read = self._were_read.get(place)
        if was_read is not None:
            return was_read.digest
        return self._index.host_blocks[self.group_id].digest(self.slots.item(place))

    def tenant(self, place: int) -> bytes:
        was_read = self._were_read.get(place)
        if was_read is not None:
            return was_read.origin.tenant
        return self._index.host_blocks[self.group_id].tenant(self.slots.item(place))

    def tier(self, place: int) -> Tier:
        """From which tier a leased block came."""
        was_read = self._were_read.get(place)
        return Tier.HOST if was_read is None else was_read.tier

    def digests(self, places: Ids) -> bytes:
        """The digests of these leased blocks, joined."""
        if self._were_read:
            return b"".join(map(self.digest, places.tolist()))
        return self._index.host_blocks[self.group_id].digests(self.slots[places].astype(np.intp))

    def owners(self, places: Ids) -> OwnerNumbers:
        """The tenants of these leased blocks."""
        if self._were_read:
            return np.array([number_of(self.tenant(place)) for place in places.tolist()], np.uint64)
        return self._index.host_blocks[self.group_id].tenants(self.slots[places].astype(np.intp))

    def release(self, places: Sequence[int] | npt.NDArray[np.int64]) -> None:
        ids = np.asarray(places, np.int64)
        slots = self.slots[ids]
        there = slots[slots != ABSENT]
        tenants = set(map(self.tenant, ids[slots != ABSENT].tolist())) if self._index.quotas.has_any else ()
        if len(there) < len(slots) and self._reads:
            for place in ids[slots == ABSENT].tolist():
                if (block_read := self._reads.pop(place, None)) is not None:
                    self._cold_reads.leave(block_read, self)
        self.slots[ids] = ABSENT
        self._pool.release(there)
        self._num_leased -= len(there)
        for tenant in tenants:  # leased blocks could not be evicted for a quota
            self._index.quotas.enforce(self.group_id, tenant)
        if not self._num_leased and not self._reads:
            self._on_ended(self)

    def time_out(self) -> None:
        for tier in {block_read.tier for block_read in self._reads.values()}:
            self._cold_reads.time_out(tier)
