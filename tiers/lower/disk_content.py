"""DiskContent: what is known of the blocks on disk, for those that load its index and try whether it can be read."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvtier.store.record import Fault
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.naming.block_hash import BlockName


class DiskContent(Protocol):
    """The index of a disk, and what follows above the disk when blocks come to be known there or are lost."""

    @property
    def disk(self) -> DiskTier:
        """The disk."""

    def on_read_failed(self, group_id: int, name: BlockName, fault: Fault) -> None:
        """Take in that a read of the block gave no bytes."""

    def load_index_page(self, keys: Sequence[bytes]) -> None:
        """Take in one page of the keys that were in the store when it was opened."""

    def forget_some_of_disk(self) -> None:
        """Forget some blocks that were on disk before its store was opened anew."""

    def offer_all_to_disk(self, num_at_once: int) -> Iterator[None]:
        """Offer all blocks above the disk to it, since its content may be other than it was; so many at each step."""
