"""The index of the blocks on disk, as its loader and the read probe see it."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvtier.store.record import Fault
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.naming.block_hash import BlockName


class DiskContent(Protocol):
    """The index of a disk, and the bookkeeping above the disk when blocks are found on it or lost."""

    @property
    def disk(self) -> DiskTier:
        """The disk tier."""

    def on_read_failed(self, group_id: int, name: BlockName, fault: Fault) -> None:
        """Handle a read of the block that returned no bytes."""

    def load_index_page(self, keys: Sequence[bytes]) -> None:
        """Add one page of the keys that were in the store when it was opened."""

    def report_forgotten(self) -> None:
        """Forget some blocks that were on disk before its store was reopened."""

    def offer_all_to_disk(self, num_at_once: int) -> Iterator[None]:
        """Offer all blocks above the disk to it, *num_at_once* per step, because its content may have changed."""
