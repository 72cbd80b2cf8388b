"""Admission: which blocks are written to disk, within and over the write budget.

Behind one H100, writing every block wears out a drive rated for one drive write per day 15 times too fast. Over the
budget, only blocks requested a second time are written: half of the hits for a fifth of the bytes (trace study).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.tiers.lower.remembered_blocks import RememberedBlocks
from kvtier.tiers.lower.write_budget import WriteBudget
from kvtier.tiers.naming.block_hash import BlockName

REMEMBERED_PER_BLOCK = 4  # refused blocks to remember per block that fits on the disk (trace study)
MAX_PROMISED = 1 << 14  # one for each chain being copied down


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Decisions since the start, in blocks and raw bytes. Each request for the same block is a new decision."""

    num_admitted: int = 0
    admitted_bytes: int = 0
    num_refused: int = 0
    refused_bytes: int = 0


class Admission:
    """The policy that admits blocks to disk: all blocks while the budget has some to spare, then only reused ones.

    A reused block is one that was refused before and is requested again. Such blocks have the budget's reserve to
    themselves; when the reserve is used up, no block is admitted.

    A block behind a hole is never admitted: not if its predecessor is refused in the same call, nor if the block is new
    and its predecessor was refused earlier and is not on disk yet. Because chains come down tail first, in batches, a
    predecessor that has not come yet cannot be checked. It is *promised* instead: it is admitted when it is requested,
    whatever the budget is then. So a chain whose tail was admitted is written to its front, and may overdraw the budget
    by its length. Admitting only continuations of blocks on disk would not work: over the budget nothing would be
    admitted, and below it only tails.

    The policy assumes that a request for a block means that it was used. A block is requested once when it comes to
    host memory, and again only when it is used there or computed anew. A request that uses a block uses all blocks
    before it, so these are requested too, later in the same round (tail first). A refused block is not kept for another
    attempt.

    Owned by the tiers' thread. The policy neither writes nor charges the budget; its caller does both.
    """

    def __init__(self, budget: WriteBudget, num_disk_blocks: int, holds: Callable[[int, BlockName], bool]) -> None:
        """Create a policy that has refused nothing yet.

        About *num_disk_blocks* blocks fit on the disk. *holds* returns whether a group's block is on disk or about to
        be written.
        """
        self._budget = budget
        self._holds = holds
        self._refused = RememberedBlocks(REMEMBERED_PER_BLOCK * num_disk_blocks)
        # Blocks to admit when they come, oldest promise first. Each promise is kept once.
        self._promised: OrderedDict[tuple[int, BlockName], None] = OrderedDict()
        self._statistics = AdmissionStatistics()

    def admit(
        self, group_id: int, names: Sequence[BlockName], parents: Sequence[BlockName | None], block_bytes: int
    ) -> list[bool]:
        """Decide for each of these blocks, which were used, whether it may be written now; remember the refused ones.

        *names* are distinct and in any order, of any number of chains. *parents* are the blocks that they continue:
        None for the first block of a chain, and for a block that is usable without its predecessor (the last blocks of
        a window, a recurrent state).
        """
        if not names or self._budget.left_bytes is None:
            self._count(len(names), 0, block_bytes)
            return [True] * len(names)
        parent_of = dict(zip(names, parents, strict=True))
        assert len(parent_of) == len(names), "a block is asked for twice in one call"
        was_refused = dict(zip(names, self._refused.has(group_id, names), strict=True))
        due = self._take_promised(group_id, parent_of)
        admitted: dict[BlockName, bool] = {}
        num_bytes = block_bytes  # the next block and all blocks admitted before it

        for name in _parents_first(parent_of):
            parent = parent_of[name]
            to_promise: BlockName | None = None
            if parent is None or parent in parent_of:
                is_joined = parent is None or admitted[parent]
            elif self._holds(group_id, parent):
                is_joined = True
            else:
                to_promise = parent
                is_joined = (
                    was_refused[name]
                    or (group_id, parent) in self._promised
                    or not self._refused.has(group_id, [parent])[0]
                )
            allows = self._budget.allows if was_refused[name] else self._budget.spares
            admitted[name] = name in due or (is_joined and allows(num_bytes))
            if admitted[name]:
                num_bytes += block_bytes
                if to_promise is not None:
                    self._promise(group_id, to_promise)

        self._refused.remember(group_id, [name for name in names if not admitted[name] and not was_refused[name]])
        num_admitted = sum(admitted.values())
        self._count(num_admitted, len(names) - num_admitted, block_bytes)
        return [admitted[name] for name in names]

    def statistics(self) -> AdmissionStatistics:
        """Return the current counts."""
        return self._statistics

    def check(self) -> None:
        """Raise AssertionError if the budget, the refused blocks or the promises are inconsistent."""
        self._budget.check()
        self._refused.check()
        assert len(self._promised) <= MAX_PROMISED, f"{len(self._promised)} promises, more than the limit"

    def _take_promised(self, group_id: int, parent_of: dict[BlockName, BlockName | None]) -> set[BlockName]:
        """Remove the promises for blocks of this call; return those blocks and their predecessors in this call."""
        due: set[BlockName] = set()
        for name in parent_of:
            if (group_id, name) in self._promised:
                del self._promised[group_id, name]
                before: BlockName | None = name
                while before is not None and before in parent_of and before not in due:
                    due.add(before)
                    before = parent_of[before]
        return due

    def _promise(self, group_id: int, name: BlockName) -> None:
        self._promised[group_id, name] = None
        if len(self._promised) > MAX_PROMISED:
            self._promised.popitem(last=False)

    def _count(self, num_admitted: int, num_refused: int, block_bytes: int) -> None:
        so_far = self._statistics
        self._statistics = AdmissionStatistics(
            so_far.num_admitted + num_admitted,
            so_far.admitted_bytes + num_admitted * block_bytes,
            so_far.num_refused + num_refused,
            so_far.refused_bytes + num_refused * block_bytes,
        )


def _parents_first(parent_of: dict[BlockName, BlockName | None]) -> Iterator[BlockName]:
    """Yield the names, each after its parent if the parent is among them."""
    seen: set[BlockName] = set()
    for name in parent_of:
        run = []
        before: BlockName | None = name
        while before is not None and before in parent_of and before not in seen:
            seen.add(before)
            run.append(before)
            before = parent_of[before]
        yield from reversed(run)
