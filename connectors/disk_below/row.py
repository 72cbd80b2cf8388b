"""Row: one block of an engine's host memory."""

from typing import NamedTuple

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
