"""LowerTiers: the seam. What any device pool needs of the tiers below it, and all that it knows of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.runs import Row
from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.admission import AdmissionStatistics
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tenant import OwnerNumbers
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.transfer.lane_speed import LaneSpeed

NOWHERE = ABSENT  # -1
ON_DISK = -2
Places = npt.NDArray[np.int32]
"""For each of some blocks the host slot that it is in, ON_DISK or NOWHERE."""


class Lost(NamedTuple):
    """No tier below has these blocks of a group any more; *tier* was the last that had them."""

    group_id: int
    names: Sequence[BlockName]
    tier: Tier


class Fetch(Protocol):
    """Some blocks of one group, leased in host memory from the moment each is there until it is released.

    Its caller releases every block that has come, or that it does not wait for any more. Who copies a slot out checks
    it against the digest: a slot is not trusted because of what these tiers say.
    """

    @property
    def group_id(self) -> int:
        """Whose blocks they are."""

    @property
    def slots(self) -> Places:
        """The host slot of each that is there and was not released; ABSENT for the others."""

    @property
    def failures(self) -> Mapping[int, Reason]:
        """Those that will not come, by place."""

    def digest(self, place: int) -> bytes:
        """Of the bytes of a block that is there, taken when they arrived in host memory."""

    def tenant(self, place: int) -> bytes:
        """Whose block it is that is there."""

    def release(self, places: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """End the leases on these, the tail of a prefix first; what has not come is not waited for any more."""

    def time_out(self) -> None:
        """Its caller's time is over: the reads under way count as hanging, or every request to come would wait as
        long."""


Tell = Callable[[Fetch, int, Reason | None], None]
"""Told in `poll` that a block, by its place in the fetch, has come (None), or why it never will."""


@dataclass(frozen=True, slots=True)
class Saving:
    """How far what is below is on its way to where it outlives the process."""

    is_there: bool = False  # there is such a place
    is_possible: bool = False  # and it is not failing
    num_left: int = 0  # blocks that are not there yet
    num_done: int = 0  # blocks that have been written since the start
    is_busy: bool = False  # some are being written
    ended_at: float = float("-inf")  # when a batch of them last was


@dataclass(frozen=True, slots=True)
class LowerStatistics:
    """All tiers below at one moment, by value."""

    tiers: Mapping[Tier, TierStatistics] = field(default_factory=dict)
    disk: DiskStatistics | None = None
    admission: AdmissionStatistics | None = None  # to the disk
    host_tenants: Mapping[bytes, int] = field(default_factory=dict)  # bytes of each with a quota


class LowerTiers(Protocol):
    """Blocks by group and name, bytes by host slot, in a memory that both sides map; no device slot, no tensor, no
    model, no request. Owned by one thread; no call waits, but for `clear` and `close`.

    What is said here may be out of date: between two calls anything below may leave, or all of it (`epoch`), and
    answers to `fetch` may be late and in any order. The only promise is that a block which has come stays in its slot
    until it is released.
    """

    @property
    def num_slots(self) -> Sequence[int]:
        """Of host memory, by group; 0 where nothing can be kept below."""

    @property
    def num_changes(self) -> int:
        """Grows with every change of what is in host memory: a place that was found is good while this stands still."""

    @property
    def epoch(self) -> int:
        """Grows when all that was known of the tiers below is void, without every loss being told: copies that rely on
        them are to be looked through."""

    @property
    def is_known(self) -> bool:
        """Whether what was below before this process began has been looked through; until then some of it is a miss."""

    @property
    def is_in_order(self) -> bool:
        """Whether all that is below can be had."""

    @property
    def is_making_room(self) -> bool:
        """Whether copies further down are under way that will leave host slots, and are not suspiciously late."""

    def find(self, group_id: int, names: Sequence[BlockName]) -> Places:
        """Where the blocks are."""

    def find_run(self, group_id: int, names: Sequence[BlockName]) -> Places:
        """Where the first of them are, as far as one after the other is somewhere."""

    def fetch(
        self,
        group_id: int,
        blocks: NamedBlocks,
        tell: Tell,
        found: Places | None = None,
    ) -> Fetch:
        """Lease these in host memory: those that are there before it returns if that can be, others after they have
        been read. *found*: the slots that `find` has just said they are in, all of them in host memory."""

    def fetch_later(self, group_id: int, blocks: NamedBlocks, tell: Tell) -> Fetch:
        """The same for blocks that will be wanted: they are read when nothing more urgent is."""

    def reserve(self, group_id: int, num_slots: int) -> list[int]:
        """Lease up to that many host slots to copy into; only such as lose nothing, where that is to be had."""

    def publish(
        self, group_id: int, slots: Ids, rows: Sequence[Row], digests: Sequence[bytes], owners: OwnerNumbers
    ) -> None:
        """The bytes of reserved *slots* are complete: their blocks can be found from now on, and the leases end. What
        was there already wins. The *rows* name the blocks, in the order of the slots; *owners* are their tenants."""

    def abandon(self, group_id: int, slots: Ids) -> None:
        """Reserved slots that were not filled: the leases end."""

    def refresh(self, group_id: int, names: Sequence[BlockName], were_read: Sequence[bool]) -> None:
        """These were used, and become the most recent, the last of them the most; *were_read*: from disk, which is told
        too."""

    def keep(self, group_id: int, places: Places) -> None:
        """What `find` has just said to be in these host slots is wanted, only not yet: it goes last."""

    def forget(self, group_id: int, names: Sequence[BlockName]) -> None:
        """The bytes of these are not what their digests say: host memory lets go of them, and counts them."""

    def clear(self) -> bool:
        """Forget every block, and end every fetch; False, and nothing has changed, while host slots are written to or
        read from, or if the disk refuses. Waits for the disk."""

    def spill(self) -> None:
        """Go on with copies further down. They yield to reads, unless they are what reads wait for."""

    def poll(self) -> None:
        """Go on with all that is under way, and tell what has come of fetches."""

    def take_lost(self) -> Sequence[Lost]:
        """What has been lost since the last call: copies that relied on it are the last ones now."""

    def read_speed(self) -> LaneSpeed:
        """How fast blocks were read from disk lately."""

    def queued_read_bytes(self) -> int:
        """Of blocks on their way from disk."""

    def saving(self) -> Saving:
        """How far `spill` has come."""

    def statistics(self) -> LowerStatistics:
        """Everything counted, by value."""

    def check(self) -> None:
        """Raise AssertionError if any two books disagree."""
