"""What may be written to disk: a budget of bytes a day, which blocks get in under and over it, and the SSD's life.

Writing every block wears a drive of one drive-write a day out 15 times too fast behind one H100. Over the budget only
what is asked for a second time is written: a fifth of the bytes for half of the hits (trace study).
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.tiers.block_hash import BlockName

DAY_S = 86_400.0
YEAR_S = 365.25 * DAY_S
TERABYTE = 10**12  # as the makers of drives count
RESERVE = 0.25  # of a day's bytes, kept for blocks that are used again: six hours' refill
REMEMBERED_PER_BLOCK = 4  # refused blocks remembered for each that the disk has room for (trace study)
MAX_PROMISED = 1 << 14  # one for each chain on its way down
WAYS = 16
GROUP_STRIDE = 0x9E3779B97F4A7C15  # odd, so that groups with the same names have keys of their own


class WriteBudget:
    """A bucket of one day's bytes that refills evenly: in N days not more than N + 1 days' worth is written.

    A quarter of it is a reserve for what matters more. Who writes says `spend` afterwards, in bytes as stored if they
    are known; what was under way meanwhile may overdraw it, and is paid back first. Owned by the tiers' thread.
    """

    def __init__(self, bytes_per_day: int | None, clock: Callable[[], float], written_last_day_bytes: int = 0) -> None:
        """None is no limit, 0 writes nothing. *written_last_day_bytes* were written in the day before the start: they
        count as if written just now, so that restarts give nothing away. ValueError if either is negative."""
        if (bytes_per_day or 0) < 0 or written_last_day_bytes < 0:
            raise ValueError(f"{bytes_per_day} bytes a day, {written_last_day_bytes} written: neither can be negative")
        self._bytes_per_day = bytes_per_day
        self._clock = clock
        self._left_bytes: float = max(0, (bytes_per_day or 0) - written_last_day_bytes)
        self._left_at = clock()

    @property
    def left_bytes(self) -> int | None:
        """What may be written now, below zero if it is overdrawn; None if there is no limit."""
        return None if self._bytes_per_day is None else math.floor(self._left_now(self._bytes_per_day))

    def allows(self, num_bytes: int) -> bool:
        """Whether that much may be written now."""
        return self._bytes_per_day is None or num_bytes <= self._left_now(self._bytes_per_day)

    def spares(self, num_bytes: int) -> bool:
        """Whether that much may be written now and the reserve stays untouched."""
        return self._bytes_per_day is None or self.allows(num_bytes + math.ceil(RESERVE * self._bytes_per_day))

    def spend(self, num_bytes: int) -> None:
        """That much was written, allowed or not."""
        if self._bytes_per_day is not None:
            self._left_bytes = self._left_now(self._bytes_per_day) - num_bytes
            self._left_at = self._clock()

    def check(self) -> None:
        """Raise AssertionError if there is more in it than a day's bytes."""
        assert self.left_bytes is None or self.left_bytes <= (self._bytes_per_day or 0), "more than one day's bytes"

    def _left_now(self, bytes_per_day: int) -> float:
        refill = (self._clock() - self._left_at) / DAY_S * bytes_per_day
        return min(bytes_per_day, self._left_bytes + refill)


class RefusedBlocks:
    """Remembers about the last *num_blocks* refused blocks, by 64 bits each: a mistake writes a block too early.

    Rows of `WAYS` places, a block's row given by its name; in a row the oldest makes way. (`Ghosts`, one ring that is
    searched as a whole, takes half a millisecond a name for the four million that a disk of a terabyte asks for.)
    """

    def __init__(self, num_blocks: int) -> None:
        num_rows = max(1, math.ceil(num_blocks / WAYS))
        self._keys = np.zeros((num_rows, WAYS), np.uint64)  # [row, place]; 0 if nobody's
        self._next = np.zeros(num_rows, np.uint8)  # [row] the place that is taken next

    def remember(self, group_id: int, names: Sequence[BlockName]) -> None:
        """These blocks were refused, and are not remembered yet."""
        keys = self._keys_of(group_id, names)
        for row, key in zip((keys % np.uint64(len(self._keys))).tolist(), keys, strict=True):
            place = int(self._next[row])
            self._keys[row, place] = key
            self._next[row] = (place + 1) % WAYS

    def has(self, group_id: int, names: Sequence[BlockName]) -> list[bool]:
        """For each block whether it is remembered."""
        keys = self._keys_of(group_id, names)
        found: list[bool] = (self._keys[keys % np.uint64(len(self._keys))] == keys[:, None]).any(axis=1).tolist()
        return found

    def check(self) -> None:
        """Raise AssertionError if a key is in another's row, twice in its own, or behind an empty place."""
        rows, places = np.nonzero(self._keys)
        assert (self._keys[rows, places] % np.uint64(len(self._keys)) == rows).all(), "a key in another's row"
        assert (self._next < WAYS).all(), "a row goes on outside itself"
        for row in np.unique(rows):
            keys = self._keys[row][self._keys[row] != 0]
            assert len(np.unique(keys)) == len(keys), "a block is remembered twice"
            assert len(keys) in (WAYS, self._next[row]), "an empty place between others"

    def _keys_of(self, group_id: int, names: Sequence[BlockName]) -> npt.NDArray[np.uint64]:
        prefixes = np.frombuffer(b"".join([name[:8] for name in names]), np.uint64)
        return prefixes ^ np.uint64(group_id * GROUP_STRIDE % 2**64)


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Decisions since the start, in blocks and in raw bytes. A block that is asked for again is decided again."""

    num_admitted: int = 0
    admitted_bytes: int = 0
    num_refused: int = 0
    refused_bytes: int = 0


class Admission:
    """Says which blocks may go to disk: all while the budget spares it, else those that were refused and used again.

    The latter have the budget's reserve to themselves, and when that is used up nothing goes.

    Never a block behind a hole: not one whose predecessor is refused in the same call, nor a new one whose predecessor
    was refused before and is not there yet. But chains come down tail first, a batch at a time, and a predecessor that
    is still to come cannot be waited for: it is *promised*, and will be admitted when it is asked for, whatever the
    budget says then. So what has begun at its tail is written to its front, and may overdraw the budget by its length.
    (Only what stands on the disk already would admit nothing at all over the budget, and fill it with tails under it.)

    What is assumed: to ask is to have used. A block is asked for once when it comes to host memory, and again only when
    it was used there or computed anew; who uses a block uses all before it, so these are asked for too, later in the
    same round (tail first). For what leaves host memory unused there is `admit_leaving`. A refused block is not kept
    for another try: nobody may wait for it.

    Owned by the tiers' thread. Writes nothing and spends nothing: that is the caller's, when the bytes are written.
    """

    def __init__(self, budget: WriteBudget, num_disk_blocks: int, holds: Callable[[int, BlockName], bool]) -> None:
        """The disk has room for about *num_disk_blocks*. *holds* says of a group's block whether the disk has it, or is
        being sent it now."""
        self._budget = budget
        self._holds = holds
        self._refused = RefusedBlocks(REMEMBERED_PER_BLOCK * num_disk_blocks)
        # Blocks that are to be admitted when they come, the oldest promise first. One is kept once.
        self._promised: OrderedDict[tuple[int, BlockName], None] = OrderedDict()
        self._statistics = AdmissionStatistics()

    def admit(
        self, group_id: int, names: Sequence[BlockName], parents: Sequence[BlockName | None], block_bytes: int
    ) -> list[bool]:
        """For each of a group's blocks, which were used, whether it may be written now. The others are remembered.

        *names* are distinct and in any order, of one chain or of many. *parents* are the names of the blocks that they
        continue; None for a chain's first block, and for one that is of use without the one before it (the last blocks
        of a window, a recurrent state).
        """
        return self._decide(group_id, names, parents, block_bytes, self._budget.allows)

    def admit_leaving(
        self, group_id: int, names: Sequence[BlockName], parents: Sequence[BlockName | None], block_bytes: int
    ) -> list[bool]:
        """As `admit`, for blocks that were refused, have not been used since, and are about to leave host memory: those
        that there is budget for after all."""
        return self._decide(group_id, names, parents, block_bytes, self._budget.spares)

    def not_written(self, group_id: int, names: Sequence[BlockName]) -> None:
        """These blocks were admitted and did not get there: the lane was full, or the disk failed.

        They are promised, since blocks behind them may be there, or come to be.
        """
        if self._budget.left_bytes is not None:
            for name in names:
                self._promise(group_id, name)

    def statistics(self) -> AdmissionStatistics:
        """The counts now, by value."""
        return self._statistics

    def check(self) -> None:
        """Raise AssertionError if the books disagree."""
        self._budget.check()
        self._refused.check()
        assert len(self._promised) <= MAX_PROMISED, f"{len(self._promised)} promises, more than there may be"

    def _decide(
        self,
        group_id: int,
        names: Sequence[BlockName],
        parents: Sequence[BlockName | None],
        block_bytes: int,
        allows_again: Callable[[int], bool],
    ) -> list[bool]:
        """The decisions, parents first; *allows_again* is what the budget says to blocks that were refused before."""
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
            allows = allows_again if was_refused[name] else self._budget.spares
            admitted[name] = name in due or (is_joined and allows(num_bytes))
            if admitted[name]:
                num_bytes += block_bytes
                if to_promise is not None:
                    self._promise(group_id, to_promise)

        self._refused.remember(group_id, [name for name in names if not admitted[name] and not was_refused[name]])
        num_admitted = sum(admitted.values())
        self._count(num_admitted, len(names) - num_admitted, block_bytes)
        return [admitted[name] for name in names]

    def _take_promised(self, group_id: int, parent_of: dict[BlockName, BlockName | None]) -> set[BlockName]:
        """The blocks that must be admitted: the promised ones, and what comes before them in this call."""
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
    """The names, each after its parent if that is among them."""
    seen: set[BlockName] = set()
    for name in parent_of:
        run = []
        before: BlockName | None = name
        while before is not None and before in parent_of and before not in seen:
            seen.add(before)
            run.append(before)
            before = parent_of[before]
        yield from reversed(run)


@dataclass(frozen=True, slots=True)
class SsdLifeStatistics:
    """What kvtier's own writes have cost the drive; others' writes and the drive's own amplification come on top."""

    used: float  # of the bytes it is made for; above 1 when it has had more
    years_left: float  # until that is 1, at the rate since the start; infinite while nothing is written


class SsdLife:
    """A gauge of the drive's endurance against the bytes written. Owned by nobody: only numbers in, numbers out."""

    def __init__(self, endurance_terabytes: float, clock: Callable[[], float], written_bytes: int) -> None:
        """*endurance_terabytes* is the maker's TBW figure, decimal; *written_bytes* are those, as stored, of all starts
        before this one. ValueError if the figure is not positive."""
        if endurance_terabytes <= 0:
            raise ValueError(f"an endurance of {endurance_terabytes} terabytes written; need more than 0")
        self._endurance_bytes = endurance_terabytes * TERABYTE
        self._clock = clock
        self._started_at = clock()
        self._written_at_start = written_bytes

    def statistics(self, written_bytes: int) -> SsdLifeStatistics:
        """The gauge when *written_bytes* were written, as stored, in this start and all before it."""
        since_start = written_bytes - self._written_at_start
        left_bytes = max(0.0, self._endurance_bytes - written_bytes)
        years = (self._clock() - self._started_at) / YEAR_S
        years_left = left_bytes / since_start * years if since_start and years else math.inf
        return SsdLifeStatistics(written_bytes / self._endurance_bytes, years_left)
