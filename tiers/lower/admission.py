"""Admission: decides which blocks are written to disk, to stay within the daily write budget.

One H100 computes 15 times as many bytes of blocks per day as may be written to a drive rated for one drive write per
day. When the budget is short, only blocks that are requested a second time are written. This gives half of the disk
hits for a fifth of the bytes (trace study).
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.tiers.lower.remembered_blocks import RememberedBlocks
from kvtier.tiers.naming.block_hash import BlockName

REMEMBERED_PER_BLOCK = 4  # refused blocks to remember per block that fits on the disk (trace study)
MAX_PROMISED = 1 << 14  # limit on promises, of which each prompt being copied down needs one
DAY_S = 86_400.0
RESERVE = 0.25  # share of a day's bytes that is kept for blocks that are used again, as much as refills in six hours


class WriteBudget:
    """A token bucket that limits the bytes written to disk.

    The bucket holds one day's bytes and refills evenly, so at most N + 1 days' bytes are written in N days. A quarter
    of the bucket is a reserve for blocks that are used again. The caller calls `allows` (with the reserve) or `spares`
    (without it) before a write, and `spend` afterwards. Concurrent writes may overdraw the bucket; then less is allowed
    until it has refilled. Owned by the tiers' thread.
    """

    def __init__(self, bytes_per_day: int | None, clock: Callable[[], float], written_last_day_bytes: int = 0) -> None:
        """Create a full bucket of *bytes_per_day* (None: no limit), less *written_last_day_bytes*.

        *written_last_day_bytes* is the number of bytes written in the day before the start, so that restarts do not
        raise the limit. Raises ValueError if a number of bytes is negative.
        """
        if (bytes_per_day or 0) < 0 or written_last_day_bytes < 0:
            raise ValueError(
                f"write budget of {bytes_per_day} bytes per day, {written_last_day_bytes} bytes in the last day: "
                "neither can be negative"
            )
        self.bytes_per_day = bytes_per_day  # None: no limit
        self._clock = clock
        self._left_bytes: float = max(0, (bytes_per_day or 0) - written_last_day_bytes)
        self._left_at = clock()

    @property
    def left_bytes(self) -> int | None:
        """Bytes that may be written now, below zero if overdrawn; None if there is no limit."""
        return None if self.bytes_per_day is None else math.floor(self._left_now(self.bytes_per_day))

    def allows(self, num_bytes: int) -> bool:
        """Return whether the budget has *num_bytes* left now, including its reserve for repeatedly used blocks."""
        return self.bytes_per_day is None or num_bytes <= self._left_now(self.bytes_per_day)

    def spares(self, num_bytes: int) -> bool:
        """Return whether the budget has *num_bytes* left now, besides its reserve for repeatedly used blocks."""
        return self.bytes_per_day is None or self.allows(num_bytes + math.ceil(RESERVE * self.bytes_per_day))

    def spend(self, num_bytes: int) -> None:
        """Subtract bytes that were written to disk from the bucket, which may be overdrawn by this."""
        if self.bytes_per_day is not None:
            self._left_bytes = self._left_now(self.bytes_per_day) - num_bytes
            self._left_at = self._clock()

    def check(self) -> None:
        """Raise AssertionError if the bucket has more than one day's bytes."""
        assert self.left_bytes is None or self.left_bytes <= (self.bytes_per_day or 0), "more than one day's bytes"

    def _left_now(self, bytes_per_day: int) -> float:
        refill = (self._clock() - self._left_at) / DAY_S * bytes_per_day
        return min(bytes_per_day, self._left_bytes + refill)


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Counts and uncompressed bytes of the blocks that `Admission` has admitted to the disk, or refused.

    They cover the time since the start. A block is counted at each use.
    """

    num_admitted: int = 0
    admitted_bytes: int = 0
    num_refused: int = 0
    refused_bytes: int = 0


class Admission:
    """The policy that decides which blocks are written to disk: all blocks, or only reused ones if the budget is short.

    Each call of `admit` with a block counts as a use of it. The first use is the copy of the block to host memory.
    Later uses are requests that find the block there or compute it again. A refused block is considered again at its
    next use, and then counts as *reused*. Only reused blocks may take bytes from the reserve of the budget.

    A block on disk is useless without its parent, which is the block before it in the prompt. So a block is refused if
    its parent is refused in the same call. A block whose parent was refused in an earlier call is refused too, unless
    the block is reused, or its parent is on disk or promised (see below).

    The last blocks of a prompt are copied down first, so a parent often comes in a later call than the block after it.
    If that block was admitted, its parent is *promised*: it will be admitted when it comes, even without any budget. So
    the prompt is written up to its beginning, which may overdraw the budget by the prompt's length.

    Owned by the tiers' thread. The policy neither writes nor charges the budget; its caller does both.
    """

    def __init__(self, budget: WriteBudget, num_disk_blocks: int, holds: Callable[[int, BlockName], bool]) -> None:
        """Create a policy that has refused nothing yet.

        *num_disk_blocks* is the approximate number of blocks that fit on the disk. *holds* returns whether a group's
        block is on disk or about to be written.
        """
        self._budget = budget
        self._holds = holds
        self._refused = RememberedBlocks(REMEMBERED_PER_BLOCK * num_disk_blocks)
        # Blocks to admit when they come, the oldest promise first. A promise ends when its block comes.
        self._promised: OrderedDict[tuple[int, BlockName], None] = OrderedDict()
        self._statistics = AdmissionStatistics()

    def admit(
        self, group_id: int, names: Sequence[BlockName], parents: Sequence[BlockName | None], block_bytes: int
    ) -> list[bool]:
        """Return for each of these blocks whether it may be written to disk now. Counts as a use of each block.

        *names* are distinct, in any order, and may belong to several prompts. *parents* are the names of the blocks
        before them in the prompt. A parent is None for the first block of a prompt, and for a block that is usable
        without its parent (in a sliding window, or as a recurrent state).
        """
        is_limited = names and self._budget.bytes_per_day is not None
        admitted = self._decide(group_id, names, parents, block_bytes) if is_limited else [True] * len(names)
        num_admitted, so_far = sum(admitted), self._statistics
        self._statistics = AdmissionStatistics(
            so_far.num_admitted + num_admitted,
            so_far.admitted_bytes + num_admitted * block_bytes,
            so_far.num_refused + len(names) - num_admitted,
            so_far.refused_bytes + (len(names) - num_admitted) * block_bytes,
        )
        return admitted

    def statistics(self) -> AdmissionStatistics:
        """Return the current counts."""
        return self._statistics

    def check(self) -> None:
        """Raise AssertionError if the policy's records are inconsistent."""
        self._budget.check()
        self._refused.check()
        assert len(self._promised) <= MAX_PROMISED, f"{len(self._promised)} promises, more than the limit"

    def _decide(
        self, group_id: int, names: Sequence[BlockName], parents: Sequence[BlockName | None], block_bytes: int
    ) -> list[bool]:
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
        return [admitted[name] for name in names]

    def _take_promised(self, group_id: int, parent_of: dict[BlockName, BlockName | None]) -> set[BlockName]:
        """Return the blocks of *parent_of* that must be admitted, because a later block of their prompt was admitted.

        These are the blocks that are in `_promised`, which are removed from it, and the blocks of *parent_of* that
        precede them in their prompts.
        """
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


def _parents_first(parent_of: dict[BlockName, BlockName | None]) -> Iterator[BlockName]:
    """Yield the names so that each comes after its parent, if the parent is among them."""
    seen: set[BlockName] = set()
    for name in parent_of:
        run = []
        before: BlockName | None = name
        while before is not None and before in parent_of and before not in seen:
            seen.add(before)
            run.append(before)
            before = parent_of[before]
        yield from reversed(run)
