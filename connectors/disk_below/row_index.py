"""`RowIndex`: the index of the rows on disk, below an engine that manages its device and host memory itself."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from kvtier.store.record import Fault
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.naming.block_hash import BlockName


class BlockRow(NamedTuple):
    """One block, with the engine's memory that its bytes are stored from or loaded into.

    *memory* is contiguous and has exactly the block's bytes. The engine must not touch it until the row's job has
    ended. *name* is 32 bytes that determine the block's bytes within the namespace and *group_id*. All rows of a group
    have the same size. *parent* is the name of the block that this one continues, in the same group. Blocks are evicted
    before their parents.
    """

    name: BlockName
    memory: memoryview
    group_id: int = 0
    parent: BlockName | None = None


class RowIndex:
    """The index of the rows on disk; implements `DiskContent`.

    The disk has the only copies that kvtier knows of, so a row that leaves the disk is forgotten.
    """

    def __init__(self, disk: DiskTier) -> None:
        self.disk = disk

    def are_held(self, rows: Sequence[BlockRow]) -> list[bool]:
        """Return for each of the rows whether it is on disk."""
        held: list[bool] = []
        for group_id, run in groupby(rows, lambda row: row.group_id):
            held += self.disk.are_held(group_id, [row.name for row in run]).tolist()
        return held

    def on_written(self, blocks: Sequence[tuple[int, BlockName]], evicted: Sequence[bytes]) -> None:
        """Record that *blocks* (group and name) were written, and that the store evicted these keys to make room."""
        for group_id, name in blocks:
            self.disk.index.add(group_id, [name])
            self.disk.ages.on_written([name])
        for key in evicted:
            if (block := self.disk.block_of(key)) is not None:
                self.disk.index.remove(*block)
                self.disk.ages.on_dropped(block[1])

    def on_read_failed(self, group_id: int, name: BlockName, fault: Fault) -> None:
        """Record that a read of the block failed, and remove the block from the index, whatever the fault.

        Otherwise an engine would find the block and request it again and again. If its record on disk is intact, the
        block is found again once the store is reopened, or once the block is stored again.
        """
        self.disk.faults[fault.value] += fault is not Fault.MISSING
        self.disk.index.remove(group_id, name)

    def load_index_page(self, keys: Sequence[bytes]) -> None:
        self.disk.load(keys)

    def report_forgotten(self) -> None:
        self.disk.index.pop_forgotten()

    def offer_all_to_disk(self, num_at_once: int) -> Iterator[None]:
        return iter(())
