"""ColdReads: from which colder tier each block comes that a fetch lacks."""

from collections.abc import Iterator, Mapping

from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.lower.reads import BlockRead, Reads, Waiter
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tier import Tier


class ColdReads:
    """The reads from all tiers below host memory. A block is read from the warmest that has it; one of which nothing is
    known any more is looked for on disk. Owned by the tiers' thread."""

    def __init__(self, index: LowerIndex, reads: Mapping[Tier, Reads]) -> None:
        """*reads* by tier, of those that there are."""
        self._index = index
        self._reads = reads

    def join(self, group_id: int, blocks: NamedBlocks, places: Ids, waiter: Waiter, now: bool) -> dict[int, BlockRead]:
        """See `Reads.join`. The blocks at places that are not in the result can be read from nowhere."""
        joined: dict[int, BlockRead] = {}
        for tier, chosen in self._by_tier(group_id, blocks, places):
            joined |= self._reads[tier].join(group_id, blocks, chosen.tolist(), waiter, now)
        return joined

    def leave(self, block_read: BlockRead, waiter: Waiter) -> None:
        """See `Reads.leave`."""
        self._reads[block_read.tier].leave(block_read, waiter)

    def pump(self) -> None:
        """See `Reads.pump`."""
        for reads in self._reads.values():
            reads.pump()

    def queued_bytes(self, tier: Tier) -> int:
        """See `Reads.queued_bytes`; 0 for a tier that there is not."""
        return self._reads[tier].queued_bytes if tier in self._reads else 0

    def time_out(self, tier: Tier) -> None:
        """See `Reads.time_out`."""
        self._reads[tier].time_out()

    def time_out_late(self, timeout_s: float) -> None:
        """See `Reads.time_out_late`."""
        for reads in self._reads.values():
            reads.time_out_late(timeout_s)

    def num_leases(self, group_id: int) -> int:
        """Host slots of the group that are being read into."""
        return sum(reads.num_leases(group_id) for reads in self._reads.values())

    def check(self) -> None:
        """See `Reads.check`."""
        for reads in self._reads.values():
            reads.check()

    def _by_tier(self, group_id: int, blocks: NamedBlocks, places: Ids) -> Iterator[tuple[Tier, Ids]]:
        """The places of the blocks to read from each tier."""
        if Tier.REMOTE in self._reads:
            is_remote = self._index.are_remote(group_id, [blocks.names[place] for place in places.tolist()])
            if is_remote.any():
                yield Tier.REMOTE, places[is_remote]
                places = places[~is_remote]
        if len(places) and Tier.DISK in self._reads:
            yield Tier.DISK, places
