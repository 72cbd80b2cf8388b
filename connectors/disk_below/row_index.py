"""RowIndex: which rows are on disk, where nothing above the disk is ours."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from kvtier.store.record import Fault
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.naming.block_hash import BlockName


class Row(NamedTuple):
    """One block's bytes where the engine has them, or wants them.

    *memory* is contiguous, has the block's bytes and no others, and is left alone by the engine until the job with it
    has ended. *name* is 32 bytes that decide them, within the namespace and *group_id*; all rows of a group are of one
    size. *parent* is the name of the block that this one continues, in the same group: of two blocks the parent leaves
    the disk later.
    """

    name: BlockName
    memory: memoryview
    group_id: int = 0
    parent: BlockName | None = None


class RowIndex:
    """See `DiskContent`. No row has a copy that we know of, so one that leaves the disk is forgotten."""

    def __init__(self, disk: DiskTier) -> None:
        self.disk = disk

    def are_held(self, rows: Sequence[Row]) -> list[bool]:
        """For each of the rows whether it is on disk."""
        held: list[bool] = []
        for group_id, run in groupby(rows, lambda row: row.group_id):
            held += self.disk.are_held(group_id, [row.name for row in run]).tolist()
        return held

    def on_written(self, blocks: Sequence[tuple[int, BlockName]], evicted: Sequence[bytes]) -> None:
        """Take in that blocks (group and name) were written, and which keys the store has evicted for them."""
        for group_id, name in blocks:
            self.disk.index.add(group_id, [name])
            self.disk.ages.on_written([name])
        for key in evicted:
            if (block := self.disk.block_of(key)) is not None:
                self.disk.index.remove(*block)
                self.disk.ages.on_dropped(block[1])

    def on_read_failed(self, group_id: int, name: BlockName, fault: Fault) -> None:
        """Take in that a read of the block gave no bytes, and count it as not on disk, whatever the fault: an engine
        that finds it would ask for it again, and again. A record that is good is known again at the next opening, or
        when it is stored again."""
        self.disk.faults[fault.value] += fault is not Fault.MISSING
        self.disk.index.remove(group_id, name)

    def load_index_page(self, keys: Sequence[bytes]) -> None:
        self.disk.load(keys)

    def forget_some_of_disk(self) -> None:
        self.disk.index.forget_some()

    def offer_all_to_disk(self, num_at_once: int) -> Iterator[None]:
        return iter(())
