"""SpillLog: a log of the batches of blocks that were copied to a lower tier, with the outcome of each batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier.store.blob_store import StoreFull
from kvtier.tiers.lower.copies import CopyBatch
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import EvictionCause
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route


class Drop(StrEnum):
    """The reason why blocks have no copy in the lower tier. After FAILED and FULL, the copy is repeated."""

    FAILED = "failed"  # the copy failed
    FULL = "full"  # the store had no room
    CLOSED = "closed"  # the lane was closed before the copy began
    PUSHED_OUT = "pushed_out"  # the blocks were written, but evicted from the disk since

    @classmethod
    def of(cls, error: BaseException) -> "Drop":
        """Return the reason why the blocks of a batch have no copy, if their copy ended with *error*."""
        return cls.CLOSED if isinstance(error, LaneClosed) else cls.FULL if isinstance(error, StoreFull) else cls.FAILED


@dataclass(frozen=True, slots=True)
class Spill:
    """A batch of one attention group's blocks that were copied to a lower tier, or were evicted too early for that.

    If the blocks were never copied, *began_at* equals *ended_at*, and *copy_s* and *num_bytes* are 0. Times are seconds
    on the clock of the `SpillLog`.
    """

    route: Route
    names: Sequence[BlockName]
    num_bytes: int  # bytes copied
    began_at: float  # when the batch was submitted to its lane
    ended_at: float  # when its outcome was processed
    copy_s: float  # how long the copy itself ran; the rest of the time it waited
    dropped: Mapping[Drop | EvictionCause, int]  # number of blocks without a copy in the lower tier, by reason


class SpillLog:
    """A log of batches of blocks that were copied to a lower tier, in the order in which the copies ended.

    Owned by the tiers' thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create an empty log. *clock* is the clock of the tiers."""
        self._clock = clock
        self._spills: list[Spill] = []

    def on_copied(self, route: Route, batch: CopyBatch, transfer: Transfer, num_pushed_out: int = 0) -> None:
        """Record a batch whose copy has ended.

        *num_pushed_out* is the number of the batch's blocks that the lower tier has already evicted again.
        """
        dropped: dict[Drop | EvictionCause, int] = {}
        if transfer.error is not None:
            dropped = {Drop.of(transfer.error): len(batch.names)}
        elif num_pushed_out:
            dropped = {Drop.PUSHED_OUT: num_pushed_out}
        num_bytes = 0 if transfer.error is not None else transfer.num_bytes
        now = self._clock()
        self._spills.append(Spill(route, batch.names, num_bytes, batch.submitted_at, now, transfer.seconds, dropped))

    def on_dropped(self, route: Route, names: Sequence[BlockName], cause: EvictionCause) -> None:
        """Record blocks that were evicted before they had a copy in the lower tier."""
        now = self._clock()
        self._spills.append(Spill(route, names, 0, now, now, 0.0, {cause: len(names)}))

    def take(self) -> list[Spill]:
        """Return the batches of blocks logged since the last call, and empty the log."""
        spills, self._spills = self._spills, []
        return spills
