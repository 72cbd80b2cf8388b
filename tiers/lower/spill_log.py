"""SpillLog: what became of blocks on their way down, for those who want to know of each batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier.store.blob_store import StoreFull
from kvtier.tiers.lower.copies import Batch
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.eviction import EvictionCause
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route


class Drop(StrEnum):
    """Why blocks of a batch are not below when the batch has ended. All but the last two are copied again."""

    FAILED = "failed"  # the copy
    FULL = "full"  # the store found no room
    CLOSED = "closed"  # the lane, before the copy began
    PUSHED_OUT = "pushed_out"  # they were written, and had to leave the disk again

    @classmethod
    def of(cls, error: BaseException) -> "Drop":
        """Why a copy that ended with this error brought nothing."""
        return cls.CLOSED if isinstance(error, LaneClosed) else cls.FULL if isinstance(error, StoreFull) else cls.FAILED


@dataclass(frozen=True, slots=True)
class Spill:
    """Blocks of one group that were copied down as one batch; or that had to leave their tier before they were, which
    took no time and moved nothing. Times in seconds, on the clock of the tiers' owner."""

    route: Route
    names: Sequence[BlockName]
    num_bytes: int  # that were copied
    began_at: float  # when the batch was given to its lane
    ended_at: float  # when its outcome was taken in
    copy_s: float  # that the copy itself ran; the rest of the time it waited
    dropped: Mapping[Drop | EvictionCause, int]  # how many of the blocks are not below, by why


class SpillLog:
    """Batches in the order in which they ended, kept until their owner takes them. Without one nothing is noted: tiers
    that are given none do nothing in its place. Owned by the tiers' thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """*clock* is that of the tiers."""
        self._clock = clock
        self._spills: list[Spill] = []

    def on_copied(self, route: Route, batch: Batch, transfer: Transfer, num_pushed_out: int = 0) -> None:
        """Note a batch whose copy has ended, well or not. *num_pushed_out* of its blocks have left again since."""
        dropped: dict[Drop | EvictionCause, int] = {}
        if transfer.error is not None:
            dropped = {Drop.of(transfer.error): len(batch.names)}
        elif num_pushed_out:
            dropped = {Drop.PUSHED_OUT: num_pushed_out}
        num_bytes = 0 if transfer.error is not None else transfer.num_bytes
        now = self._clock()
        self._spills.append(Spill(route, batch.names, num_bytes, batch.submitted_at, now, transfer.seconds, dropped))

    def on_dropped(self, route: Route, names: Sequence[BlockName], cause: EvictionCause) -> None:
        """Note blocks that had no copy below, and left their tier before they could be copied."""
        now = self._clock()
        self._spills.append(Spill(route, names, 0, now, now, 0.0, {cause: len(names)}))

    def take(self) -> list[Spill]:
        """Take out all batches since the last call."""
        spills, self._spills = self._spills, []
        return spills
