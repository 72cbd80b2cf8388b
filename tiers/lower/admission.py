"""Admission: which blocks are let in to the disk, under and over its budget of writes.

Writing every block wears a drive of one drive-write a day out 15 times too fast behind one H100. Over the budget only
what is asked for a second time is written: a fifth of the bytes for half of the hits (trace study).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.tiers.lower.remembered_blocks import RememberedBlocks
from kvtier.tiers.lower.write_budget import WriteBudget
from kvtier.tiers.naming.block_hash import BlockName

REMEMBERED_PER_BLOCK = 4  # refused blocks remembered for each that the disk has room for (trace study)
MAX_PROMISED = 1 << 14  # one for each chain on its way down


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Decisions since the start, in blocks and in raw bytes. A block that is asked for again is decided again."""

    num_admitted: int = 0
    admitted_bytes: int = 0
    num_refused: int = 0
    refused_bytes: int = 0


class Admission:
    """Says which blocks may go to disk: all while the budget spares it, else those that were refused and used again.

    The latter have the budget's reserve to themselves; when that is used up no block may go.

    Never a block behind a hole: not one whose predecessor is refused in the same call, nor a new one whose predecessor
    was refused before and is not there yet. But chains come down tail first, a batch at a time, and a predecessor that
    is still to come cannot be waited for: it is *promised*, and will be admitted when it is asked for, whatever the
    budget says then. So what has begun at its tail is written to its front, and may overdraw the budget by its length.
    (To admit only what continues a block on disk: nothing would be admitted over the budget, and tails under it.)

    It assumes that to ask is to have used. A block is asked for once when it comes to host memory, and again only when
    it was used there or computed anew; a request that uses a block uses all before it, so these are asked for too,
    later in the same round (tail first). A refused block is not kept for another try: nothing waits for it.

    Owned by the tiers' thread. Writes nothing and spends nothing: its caller does, when the bytes are written.
    """

    def __init__(self, budget: WriteBudget, num_disk_blocks: int, holds: Callable[[int, BlockName], bool]) -> None:
        """*num_disk_blocks*: about as many have room on disk. *holds* says whether a group's block is there, or on its
        way."""
        self._budget = budget
        self._holds = holds
        self._refused = RememberedBlocks(REMEMBERED_PER_BLOCK * num_disk_blocks)
        # Blocks that are to be admitted when they come, the oldest promise first. One is kept once.
        self._promised: OrderedDict[tuple[int, BlockName], None] = OrderedDict()
        self._statistics = AdmissionStatistics()

    def admit(
        self, group_id: int, names: Sequence[BlockName], parents: Sequence[BlockName | None], block_bytes: int
    ) -> list[bool]:
        """Decide for each of these blocks, which were used, whether it may be written now; the others are remembered.

        *names* are distinct and in any order, of one chain or of many. *parents* are the names of the blocks that they
        continue; None for a chain's first block, and for one that is of use without the one before it (the last blocks
        of a window, a recurrent state).
        """
        if not names or self._budget.left_bytes is None:
            self._count(len(names), 0, block_bytes)
            return [True] * len(names)
        parent_of = dict(zip(names, parents, strict=True))
        assert len(parent_of) == len(names), "a block is asked for twice in one call"
        was_refused = dict(zip(names, self._refused.has(group_id, names), strict=True))
        due = self._take_promised(group_id, parent_of)
        admitted: dict[BlockName, bool] = {}
        num_bytes = block_bytes  # of the next block and all that are admitted before it

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
        """The counts now, by value."""
        return self._statistics

    def check(self) -> None:
        """Raise AssertionError if the books disagree."""
        self._budget.check()
        self._refused.check()
        assert len(self._promised) <= MAX_PROMISED, f"{len(self._promised)} promises, more than there may be"

    def _take_promised(self, group_id: int, parent_of: dict[BlockName, BlockName | None]) -> set[BlockName]:
        """Take the promises for blocks of this call; the blocks to admit: those, and those before them in this call."""
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
    """The names, each after its parent if its parent is among them."""
    seen: set[BlockName] = set()
    for name in parent_of:
        run = []
        before: BlockName | None = name
        while before is not None and before in parent_of and before not in seen:
            seen.add(before)
            run.append(before)
            before = parent_of[before]
        yield from reversed(run)
