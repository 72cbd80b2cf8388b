"""LowerTiers: the contract between a device pool and the tiers below it (host memory, disk, remote), and its values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.eviction_order import Row
from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.admission import AdmissionStatistics
from kvtier.tiers.lower.inquiry import Inquiry
from kvtier.tiers.lower.purge import Purge, PurgeOrder
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.eviction import EvictionCause
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tenant import OwnerNumbers
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.transfer.lane_speed import LaneSpeed

NOWHERE = ABSENT  # -1
ON_DISK = -2
ON_REMOTE = -3
Places = npt.NDArray[np.int32]
"""Where each of some blocks is: the number of its host slot, ON_DISK, ON_REMOTE, or NOWHERE."""


def are_kept(places: Places) -> npt.NDArray[np.bool_]:
    """For each of the places whether the tiers below keep the block themselves. What is on a remote store alone is
    others' to evict: a copy above is the last one that is sure."""
    kept: npt.NDArray[np.bool_] = (places >= 0) | (places == ON_DISK)
    return kept


def are_cold(places: Places) -> npt.NDArray[np.bool_]:
    """For each of the places whether the block has to be read before it is in host memory."""
    cold: npt.NDArray[np.bool_] = (places == ON_DISK) | (places == ON_REMOTE)
    return cold


class Lost(NamedTuple):
    """Blocks of one group that no tier below has any more; *tier* was the last that had them, and forgot them for this
    *cause*."""

    group_id: int
    names: Sequence[BlockName]
    tier: Tier
    cause: EvictionCause


class Fetch(Protocol):
    """Leases on some blocks of one group in host memory: each begins when its block is there, and ends with `release`.

    The caller of `LowerTiers.fetch` owns the leases. It releases each block that has come, and each that it does not
    wait for any more; a fetch that it forgets keeps its slots for ever. It checks what it copies out of a slot against
    the block's digest: these tiers do not vouch for the bytes.
    """

    @property
    def group_id(self) -> int:
        """The group whose blocks these are."""

    @property
    def slots(self) -> Places:
        """For each block the host slot that is leased for it; ABSENT before it has come and after it was released."""

    @property
    def failures(self) -> Mapping[int, Reason]:
        """Why blocks will never come, by their place in the fetch."""

    def digest(self, place: int) -> bytes:
        """The digest of a leased block's bytes, taken when they arrived in host memory or were written to disk."""

    def tenant(self, place: int) -> bytes:
        """The tenant of a leased block."""

    def release(self, places: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """End the leases on these blocks; *places* has the tail of a prefix first, so that it is evicted first.

        A block that has not come is not waited for any more: `on_fetched` is not called for it, and it is not read,
        unless that has begun or another fetch wants it. Releasing a block twice does nothing.
        """

    def time_out(self) -> None:
        """Give up the reads that this fetch waits for: they count as hanging.

        The disk is left alone for a while then, and what other fetches wait for fails too: else every request to come
        would wait as long. Does nothing if the fetch waits for no block.
        """


OnFetched = Callable[[Fetch, int, Reason | None], None]
"""`on_fetched(fetch, place, failure)`: a block has come and is leased (*failure* is None), or why it never will.

Called inside `LowerTiers.poll`, once for each block that was not leased when `fetch` returned, unless it was released.
"""


@dataclass(frozen=True, slots=True)
class SpillProgress:
    """How many blocks `LowerTiers.spill` has copied to a tier that outlives the process, and how many it has not."""

    has_target: bool = False  # there is such a tier
    is_possible: bool = False  # and it takes blocks: it is open, and has not been given up
    num_left: int = 0  # blocks of host memory that are still to be copied
    num_done: int = 0  # blocks that have been copied since the start
    is_busy: bool = False  # whether copies are under way
    ended_at: float = float("-inf")  # when a batch of copies ended last, on the owner's clock


@dataclass(frozen=True, slots=True)
class LowerStatistics:
    """All tiers below at one moment, by value."""

    tiers: Mapping[Tier, TierStatistics] = field(default_factory=dict)
    disk: DiskStatistics | None = None
    remote: RemoteStatistics | None = None
    admission: AdmissionStatistics | None = None  # to the disk
    host_tenants: Mapping[bytes, int] = field(default_factory=dict)  # bytes of host memory of each tenant with a quota


class LowerTiers(Protocol):
    """Blocks below the device: found by group and name, leased by host slot, read and written by the caller.

    The memory of the host slots is mapped by both sides; what crosses this contract is names, slot numbers, digests and
    counts. It knows no device slot, no tensor, no model and no request.

    Ownership: one thread calls everything here. A slot that `fetch` or `reserve` leases is the caller's until it is
    released, published or abandoned; its bytes stay, and no other block is put there, whatever happens below. That is
    the only promise: what has no lease may leave between any two calls, and all of it may (`epoch`).

    Time: no call waits for a copy, a disk or another process, but for `clear`. So an implementation whose blocks are in
    another process answers from what it was last told: `find` may be out of date, `reserve` may give less than there
    is, and a fetch may begin with no lease at all and be answered in later polls, in any order.

    Failure: no method raises for what goes wrong below. A block that cannot be had is NOWHERE, a `Fetch.failures` with
    its reason, or a `Lost`; what cannot be written stays where it is.
    """

    @property
    def num_slots(self) -> Sequence[int]:
        """Slots of host memory, by group; all 0 where nothing can be kept below. Never changes."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory, of all groups; 0 also while there is none, see `epoch`."""

    @property
    def num_changes(self) -> int:
        """A number that grows with every change of which block is in which host slot.

        While it stands still the host slots that `find` named are still those blocks'.
        """

    @property
    def epoch(self) -> int:
        """A number that grows when blocks may be gone from below without having been told by `take_lost`.

        The caller then looks again for each of its blocks that it took to have a copy below.
        """

    @property
    def is_indexed(self) -> bool:
        """Whether the blocks that were below before this process began are known; until then some are not found."""

    @property
    def is_readable(self) -> bool:
        """Whether every tier below can be read from, as far as is known; if not, what only it has is not found."""

    @property
    def can_ask(self) -> bool:
        """Whether there is a tier that cannot tell at once what it has, so that `inquire` may find more."""

    @property
    def is_making_room(self) -> bool:
        """Whether copies further down are under way that will leave host slots, and are not suspiciously late."""

    def find(self, group_id: int, names: Sequence[BlockName]) -> Places:
        """Where the blocks are, for each of *names*: a hint, and no lease. Changes nothing, the order included.

        Costs the caller's thread up to half a microsecond a block (DESIGN.md, sections 7 and 10), and no wait.
        """

    def find_run(self, group_id: int, names: Sequence[BlockName]) -> Places:
        """As `find`, up to the first block that is NOWHERE: as many places as blocks before it."""

    def inquire(self, group_id: int, names: Sequence[BlockName]) -> Inquiry:
        """Have tiers asked that cannot tell at once about *names*, a prefix's blocks from the first on that `find` does
        not know. The inquiry is done in a later poll, within a few hundredths of a second, or at once."""

    def fetch(
        self,
        group_id: int,
        blocks: NamedBlocks,
        on_fetched: OnFetched,
        found: Places | None = None,
    ) -> Fetch:
        """Lease these blocks in host memory, and have those read from colder tiers that are only there; the caller
        releases.

        What is in host memory may be leased before this returns (`Fetch.slots`); of everything else *on_fetched* is
        told. A block that is nowhere is a failure with its reason.

        *found* saves looking the blocks up: the host slots that `find` said they are in, all of them host slots. It is
        taken at its word, so a stale one would lease another block, whose digest fits the bytes in the slot. Give it
        straight after `find` only, or while `num_changes` is what it was then. An implementation may ignore it.
        """

    def fetch_later(self, group_id: int, blocks: NamedBlocks, on_fetched: OnFetched) -> Fetch:
        """As `fetch`, for blocks that will be wanted: they are read while nothing that `fetch` asked for is to be."""

    def reserve(self, group_id: int, num_slots: int) -> list[int]:
        """Lease up to *num_slots* host slots for the caller to copy blocks into; it publishes or abandons each.

        May be fewer, also none: ask again after a poll. Evicts the oldest blocks for it, first those that have a copy
        further down; a block without one only while the disk takes nothing.
        """

    def publish(
        self, group_id: int, slots: Ids, rows: Sequence[Row], digests: Sequence[bytes], owners: OwnerNumbers
    ) -> None:
        """Make the blocks in these reserved slots findable, whose bytes are complete, and end the leases.

        *rows* name the blocks in the order of *slots*, each row a run of one chain, tail first; *digests* of their
        bytes and *owners*, the tenants, are in that order too. A block that host memory has already stays where it is,
        and the slot that was filled for it is free.
        """

    def abandon(self, group_id: int, slots: Ids) -> None:
        """End the leases on reserved slots that were not filled: nothing can be found in them."""

    def refresh(self, group_id: int, names: Sequence[BlockName], were_read: Sequence[bool]) -> None:
        """Make blocks that were used the most recent ones of host memory, the last of *names* the most recent.

        *were_read*: for each whether it came from disk, where it becomes recent too; empty if none did. Blocks that are
        not in host memory any more are left out.
        """

    def evict_last(self, group_id: int, places: Places) -> None:
        """Make the blocks in these host slots the last to be evicted: they are wanted, only not yet.

        *places* of a prefix in its order, ON_DISK and NOWHERE among them are left out. As with `fetch`, a stale place
        means another block: give it while `num_changes` stands still only. An implementation may ignore the call.
        """

    def forget(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Drop blocks from host memory whose bytes are not what their digests say, and count them as corrupt.

        Copies on disk stay.
        """

    def clear(self) -> bool:
        """Forget every block in all tiers below, and end every fetch; whether that was done. `take_lost` tells of the
        blocks, of those on disk of as many as anyone remembers.

        False, and no block is forgotten in host memory, while host slots are reserved, read into or written to disk, or
        if the disk refuses. The only call that waits: for the disk.
        """

    def purge(self, order: PurgeOrder) -> Purge:
        """An eviction that an operator asks for, from the tiers here that *order* names; nothing has left yet.

        Where the tiers are another process's nothing will: that one's operators ask it.
        """

    def spill(self) -> None:
        """Start copies from host memory further down that are due. They yield to reads, unless reads wait for them."""

    def make_room(self) -> None:
        """Start copies from host memory further down only if host slots are lacking for `reserve` or for reads.

        A device pool asks for this in place of `spill` while a load is under way to it, and while it copies down what
        one will push out: other writes would only slow that load. Slots are lacking if `reserve` gave fewer than it was
        asked for since the last call.
        """

    def poll(self) -> None:
        """Go on with all that is under way, and call `on_fetched` for blocks of fetches that have come or failed.

        The caller polls as long as anything is under way, and before it plans: nothing here goes on by itself.
        """

    def take_lost(self) -> Sequence[Lost]:
        """Hand over which blocks have left the last tier below that had them, since the last call.

        A copy of such a block above is the last one now.
        """

    def read_speed(self, tier: Tier) -> LaneSpeed:
        """How fast blocks were read from that tier lately."""

    def queued_read_bytes(self, tier: Tier) -> int:
        """Bytes of the blocks that are being read from that tier, or are to be read now."""

    def spill_progress(self) -> SpillProgress:
        """How far `spill` has come."""

    def statistics(self) -> LowerStatistics:
        """Everything counted below, by value."""

    def check(self) -> None:
        """Raise AssertionError if any two books disagree. For tests, and for servers when they are idle."""
