"""`RowIndex`: an index of the blocks on disk, for an engine that manages its own device and host memory."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from kvtier.store.record import Fault
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.naming.block_hash import BlockName


class BlockRow(NamedTuple):
    """A block to store or to load, with the engine's memory that its bytes come from or go to.

    *memory* is contiguous and exactly as large as the block. The engine must not touch it until the load or store has
    ended. *name* has 32 bytes. Together with the namespace and *group_id* it identifies the block. All blocks of a
    group have the same size. *parent* is the name of the preceding block of the prefix, in the same group. A block is
    evicted before its parent.
    """

    name: BlockName
    memory: memoryview
    group_id: int = 0
    parent: BlockName | None = None


class RowIndex:
    """An in-memory index of the blocks on disk, which are looked up as rows: blocks with the engine's memory for them.

    It implements the protocol `DiskContent`. A block that is evicted from disk is removed from the index.
    """

    def __init__(self, disk: DiskTier) -> None:
        self.disk = disk

    def are_held(self, rows: Sequence[BlockRow]) -> list[bool]:
        """Return for each of the rows whether its block is on disk."""
        held: list[bool] = []
        for group_id, run in groupby(rows, lambda row: row.group_id):
            held += self.disk.are_held(group_id, [row.name for row in run]).tolist()
        return held

    def on_written(self, blocks: Sequence[tuple[int, BlockName]], evicted: Sequence[bytes]) -> None:
        """Record that *blocks* (pairs of group and name) were written, and which keys the store *evicted* for them."""
        for group_id, name in blocks:
            self.disk.index.add(group_id, [name])
            self.disk.ages.on_written([name])
        for key in evicted:
            if (block := self.disk.block_of(key)) is not None:
                self.disk.index.remove(*block)
                self.disk.ages.on_dropped(block[1])

    def on_read_failed(self, group_id: int, name: BlockName, fault: Fault) -> None:
        """Record that a read of the block failed, and remove the block from the index.

        Otherwise the engine would find the block and request it again and again. If the block is intact on disk,
        lookups find it again after the store is reopened or the block is stored again.
        """
        self.disk.faults[fault.value] += fault is not Fault.MISSING
        self.disk.index.remove(group_id, name)

    def load_index_page(self, keys: Sequence[bytes]) -> None:
        self.disk.load(keys)

    def report_forgotten(self) -> None:
        self.disk.index.pop_forgotten()

    def offer_all_to_disk(self, num_at_once: int) -> Iterator[None]:
        return iter(())
