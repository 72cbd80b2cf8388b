"""LocalPurge: evicts blocks from the host memory and the disk of this process, at an operator's request."""

from collections.abc import Iterator, Mapping, Sequence

from kvtier.tiers.device.slot_purge import SlotPurge
from kvtier.tiers.lower.disk_purge import DiskPurge
from kvtier.tiers.lower.purge import Purged
from kvtier.tiers.naming.tier import Tier


class LocalPurge:
    """A purge of host memory and then of the disk; implements `Purge`.

    Host memory comes first. If one of its blocks is written to disk meanwhile, the purge of the disk finds that copy.
    """

    def __init__(self, host: Sequence[SlotPurge], block_bytes: Sequence[int], disk: DiskPurge | None) -> None:
        """Create a purge that has evicted nothing yet.

        *host* and *block_bytes* are by attention group. If *host* is empty, host memory is not purged. If *disk* is
        None, the disk is not purged.
        """
        self._host = host
        self._block_bytes = block_bytes
        self._disk = disk

    @property
    def num_evicted(self) -> int:
        return sum(each.num_evicted for each in self._host) + (0 if self._disk is None else self._disk.num_evicted)

    @property
    def is_settled(self) -> bool:
        return all(each.is_settled for each in self._host)

    def parts(self) -> Iterator[bool]:
        for each in self._host:
            yield from each.parts()
        if self._disk is not None:
            yield from self._disk.parts()

    def outcome(self) -> Mapping[Tier, Purged]:
        found: dict[Tier, Purged] = {}
        if self._host:
            found[Tier.HOST] = purged(self._host, self._block_bytes)
        if self._disk is not None:
            found[Tier.DISK] = Purged(self._disk.num_evicted, self._disk.num_bytes, 0, self._disk.why_not)
        return found


def purged(groups: Sequence[SlotPurge], block_bytes: Sequence[int]) -> Purged:
    """Return the outcome of purging the slots of all groups. *groups* and *block_bytes* are by attention group."""
    num_blocks = [each.num_evicted for each in groups]
    num_bytes = sum(num * size for num, size in zip(num_blocks, block_bytes, strict=True))
    return Purged(sum(num_blocks), num_bytes, sum(each.num_leased() for each in groups))


def limit_per_group(max_bytes: int | None, max_blocks: int | None, block_bytes: Sequence[int]) -> int | None:
    """Return the maximum number of blocks to evict from each attention group; None if there is no limit.

    *max_bytes* or *max_blocks* is the limit of the whole tier. Every group gets the same number of blocks, rounded up.
    *block_bytes* is the size of a block, by group.
    """
    if max_bytes is not None:
        return -(-max_bytes // sum(block_bytes))
    return None if max_blocks is None else -(-max_blocks // len(block_bytes))
