"""The contract between a device pool and the tiers below it (host memory, disk, remote), with its values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.admission import AdmissionStatistics
from kvtier.tiers.lower.purge import Purge, PurgeOrder
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import NamedBlocks, OwnerNumbers
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.transfer.lane import LaneSpeed

NOWHERE = ABSENT  # -1
ON_DISK = -2
ON_REMOTE = -3
Places = npt.NDArray[np.int32]
"""The place of each of some blocks: the number of its host slot, ON_DISK, ON_REMOTE, or NOWHERE."""


class Inquiry(Protocol):
    """A lookup in a tier that does not answer at once, for example the remote tier. It is in flight or answered."""

    @property
    def is_done(self) -> bool:
        """Whether `LowerTiers.find` knows the answer by now, or the answer would come too late for the request."""


class Answered:
    """The inquiry of tiers that answer at once; implements `Inquiry`."""

    is_done = True


class AllOf:
    """Several inquiries as one; implements `Inquiry`."""

    def __init__(self, inquiries: Sequence[Inquiry]) -> None:
        self._inquiries = inquiries

    @property
    def is_done(self) -> bool:
        return all(inquiry.is_done for inquiry in self._inquiries)


NOTHING_TO_ASK = Answered()


def names_at(names: Sequence[BlockName], places: Ids) -> Sequence[BlockName]:
    """Return the names at these distinct *places*."""
    return names if len(places) == len(names) else [names[i] for i in places.tolist()]


def are_kept(places: Places) -> npt.NDArray[np.bool_]:
    """Return for each place whether it is one that counts as a copy below: in host memory or on disk.

    A block that only a remote store has does not count, because other machines may evict it. A copy on the device is
    then the last one that is certain.
    """
    kept: npt.NDArray[np.bool_] = (places >= 0) | (places == ON_DISK)
    return kept


def are_cold(places: Places) -> npt.NDArray[np.bool_]:
    """Return for each place whether the block must be read before it is in host memory."""
    cold: npt.NDArray[np.bool_] = (places == ON_DISK) | (places == ON_REMOTE)
    return cold


class Lost(NamedTuple):
    """Blocks of one group that no tier below has any more; *tier* was the last one, and evicted them for *cause*."""

    group_id: int
    names: Sequence[BlockName]
    tier: Tier
    cause: EvictionCause


class Fetch(Protocol):
    """Leases on blocks of one attention group in host memory.

    The lease of a block begins when the block is in host memory, and ends with `release`. The caller of
    `LowerTiers.fetch` owns the leases. It releases each block that has come, and each that it no longer waits for; a
    fetch that is never released keeps its slots forever. The caller compares the bytes that it copies out of a slot
    with the block's digest, because these tiers do not guarantee the bytes.
    """

    @property
    def group_id(self) -> int:
        """Group of the blocks."""

    @property
    def slots(self) -> Places:
        """Host slot leased for each block; ABSENT before the block has come and after it was released."""

    @property
    def failures(self) -> Mapping[int, Reason]:
        """Reasons why blocks will never come, by place in the fetch."""

    def digest(self, place: int) -> bytes:
        """Return the digest of a leased block, computed when its bytes came to host memory or were written to disk."""

    def tenant(self, place: int) -> bytes:
        """Return the tenant of a leased block."""

    def release(self, places: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """End the leases on these blocks; *places* has the tail of a prefix first, so that the tail is evicted first.

        For a block that has not come yet, `on_fetched` is not called any more. Its read is canceled, unless the read
        has begun or another fetch wants the block. Releasing a block twice has no effect.
        """

    def time_out(self) -> None:
        """Give up the reads that this fetch waits for, and count them as hung.

        The disk is then not used for a while, and other fetches fail too, because otherwise every later request would
        wait just as long. Has no effect if the fetch waits for no block.
        """


OnFetched = Callable[[Fetch, int, Reason | None], None]
"""Callback `on_fetched(fetch, place, failure)`: a block is leased now (*failure* is None), or will never come.

Called inside `LowerTiers.poll`, once for each block that was not leased when `fetch` returned, unless it was released.
"""


@dataclass(frozen=True, slots=True)
class SpillProgress:
    """How many blocks `LowerHints.spill` has copied to its target, and how many are left.

    The target is a tier that outlives this process: the disk, or the host memory of a sidecar.
    """

    has_target: bool = False  # whether there is such a tier
    is_possible: bool = False  # whether the target accepts blocks: it is open, and writing is not suspended
    num_left: int = 0  # blocks of host memory still to be copied
    num_done: int = 0  # blocks copied since the start
    is_busy: bool = False  # whether copies are in flight
    ended_at: float = float("-inf")  # when the last batch of copies ended, on the owner's clock


@dataclass(frozen=True, slots=True)
class LowerStatistics:
    """Statistics of all tiers below the device at one moment."""

    tiers: Mapping[Tier, TierStatistics] = field(default_factory=dict)
    disk: DiskStatistics | None = None
    remote: RemoteStatistics | None = None
    admission: AdmissionStatistics | None = None  # of the disk
    host_tenants: Mapping[bytes, int] = field(default_factory=dict)  # bytes of host memory of each tenant with a quota


class ReadPriority(Enum):
    """When blocks are read from a colder tier: at once, or only while no read with priority NOW is due."""

    NOW = auto()
    LATER = auto()


class LowerStatus(Protocol):
    """The present state of the tiers below the device: levels, speeds and counts. Reading it changes nothing."""

    @property
    def num_slots(self) -> Sequence[int]:
        """Number of host slots, by group; all 0 where nothing can be kept below. Never changes."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of all groups; 0 while there is none, see `epoch`."""

    @property
    def num_changes(self) -> int:
        """A number that grows with every change of which block is in which host slot.

        While it is unchanged, the host slots returned by `find` still hold those blocks.
        """

    @property
    def epoch(self) -> int:
        """A number that grows when blocks may have left the tiers below without being reported by `pop_lost`.

        The caller must then look up again each of its blocks that it assumed to have a copy below.
        """

    @property
    def is_indexed(self) -> bool:
        """Whether all blocks that were stored before this process started are known. Until then, some are not found."""

    @property
    def is_readable(self) -> bool:
        """Whether blocks can be read from the tiers below, as far as is known.

        If not, blocks that only an unreadable tier has are misses.
        """

    @property
    def is_making_room(self) -> bool:
        """Whether copies to disk that will free host slots are in flight and not overdue."""

    def read_speed(self, tier: Tier) -> LaneSpeed:
        """Return how fast blocks were recently read from *tier*."""

    def queued_read_bytes(self, tier: Tier) -> int:
        """Return the bytes of the blocks that are being read from *tier* or are queued to be read now."""

    def spill_progress(self) -> SpillProgress:
        """Return the progress of `LowerHints.spill`."""

    def statistics(self) -> LowerStatistics:
        """Return everything counted below the device."""

    def check(self) -> None:
        """Raise AssertionError if the indexes and counts disagree. For tests, and for servers when they are idle."""


class LowerHints:
    """Calls that an implementation of `LowerTiers` may ignore; by default they do nothing.

    Owned by the tiers' thread.
    """

    @property
    def can_ask(self) -> bool:
        """Whether a tier, such as the remote tier, cannot say at once what it has, so that `inquire` may find more."""
        return False

    def inquire(self, group_id: int, names: Sequence[BlockName]) -> Inquiry:
        """Query the tiers that cannot say at once whether they have *names*.

        *names* are a prefix's blocks from the first one that `LowerTiers.find` does not know. The inquiry is done at
        once, or in a later poll within a few hundredths of a second.
        """
        return NOTHING_TO_ASK

    def evict_last(self, group_id: int, places: Places) -> None:
        """Make the blocks in these host slots the last to be evicted, because a request will need them.

        *places* are those of a prefix in order; places that are not host slots are ignored. A slot may hold another
        block after a change, so call this only while `LowerStatus.num_changes` is unchanged.
        """

    def spill(self) -> None:
        """Start the copies from host memory to colder tiers that are due.

        While a request waits for reads, only copies that make room for these reads are started.
        """

    def make_room(self) -> None:
        """Start copies from host memory to disk only if `LowerTiers.reserve` or reads lack host slots.

        `reserve` lacks slots if it has returned fewer than requested since the last call. Call this instead of `spill`
        while a load to the device is in flight, and while blocks that a load will evict are copied from the device.
        Other writes to disk would only slow that load down.
        """


class LowerTiers(Protocol):
    """The tiers below the device: blocks are found by group and name, leased by host slot, and copied by the caller.

    Both sides map the memory of the host slots. Only names, slot numbers, digests and counts cross this contract. It
    has no notion of device slots, tensors, models or requests.

    Ownership: one thread makes all calls. A slot leased by `fetch` or `reserve` belongs to the caller until it is
    released, published or abandoned. Until then its bytes stay, and no other block is put there, whatever happens
    below. There is no other promise: a block without a lease may be evicted between any two calls, and so may all
    blocks at once (`LowerStatus.epoch`).

    Time: no call except `clear` waits for a copy, a disk or another process. An implementation whose blocks are in
    another process answers from that process's last report. So `find` may be outdated, `reserve` may return fewer slots
    than exist, and a fetch may begin without leases and be answered in later polls, in any order.

    Failure: no method raises because of a failure below. A block that is unavailable is NOWHERE, a `Lost`, or an entry
    with a reason in `Fetch.failures`. A block that cannot be written stays where it is.
    """

    @property
    def status(self) -> LowerStatus:
        """State of the tiers, always current."""

    @property
    def hints(self) -> LowerHints:
        """Hints to the tiers, which may ignore them."""

    def find(self, group_id: int, names: Sequence[BlockName]) -> Places:
        """Return where the blocks of *names* are, as a hint without leases. Does not change the eviction order.

        Takes up to half a microsecond of the caller's thread per block (DESIGN.md, sections 7 and 10); does not block.
        """

    def find_run(self, group_id: int, names: Sequence[BlockName]) -> Places:
        """Return the places of the blocks before the first one that is NOWHERE, like `find`."""

    def fetch(
        self,
        group_id: int,
        blocks: NamedBlocks,
        on_fetched: OnFetched,
        found: Places | None = None,
        priority: ReadPriority = ReadPriority.NOW,
    ) -> Fetch:
        """Lease these blocks in host memory, reading those that are only in colder tiers; the caller releases them.

        Blocks in host memory may be leased before this returns (`Fetch.slots`). For every other block, *on_fetched* is
        called later; for a block that no tier has, with the reason.

        Args:
            group_id: Group of the blocks.
            blocks: Blocks to lease.
            on_fetched: Called for each block that is leased later, or never.
            found: Host slots of all blocks as returned by `find`, to save another lookup. They are not checked. If a
                slot held another block by now, that block would be leased, and its digest would match. So pass the
                slots only directly after `find`, or while `LowerStatus.num_changes` is unchanged. An implementation may
                ignore them.
            priority: When to read the blocks that are only in colder tiers.
        """

    def reserve(self, group_id: int, num_slots: int) -> list[int]:
        """Lease up to *num_slots* host slots to copy blocks into. The caller must `publish` or `abandon` each of them.

        Evicts the oldest blocks, preferably those with a copy on disk. Blocks without such a copy are evicted only
        while the disk accepts no blocks. Returns fewer slots, or none, if there is no room; try again after a poll.
        """

    def publish(
        self, group_id: int, slots: Ids, rows: Sequence[NamedSpan], digests: Sequence[bytes], owners: OwnerNumbers
    ) -> None:
        """Make the blocks in these reserved slots findable, now that their bytes are complete, and end the leases.

        If host memory already has a block, that copy stays, and the slot filled for the block becomes free.

        Args:
            group_id: Group of the blocks.
            slots: Reserved slots.
            rows: Names of the blocks in the order of *slots*. Each row has consecutive blocks of one chain, the last
                block first.
            digests: Digests of the blocks' bytes, in the same order.
            owners: Tenants of the blocks, in the same order.
        """

    def abandon(self, group_id: int, slots: Ids) -> None:
        """End the leases on reserved slots that were not filled; they hold no block."""

    def refresh(self, group_id: int, names: Sequence[BlockName], were_read: Sequence[bool]) -> None:
        """Make blocks that were used the most recent ones of host memory, the last of *names* the most recent.

        Blocks that are no longer in host memory are ignored. *were_read* says for each block whether it came from disk
        (empty: none did). Such a block becomes recent on disk too.
        """

    def forget(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Drop these blocks, whose bytes do not match their digests, from host memory, and count them as corrupt.

        Copies on disk stay.
        """

    def clear(self) -> bool:
        """Forget every block in all tiers below, and end every fetch. This is the only call that blocks, on the disk.

        `pop_lost` reports the blocks, but of those on disk no more than the caller can remember (`NUM_GHOSTS`).

        Returns:
            False if host slots are reserved, being read into or being written to disk, or if the disk fails. Then no
            block in host memory is forgotten.
        """

    def purge(self, order: PurgeOrder) -> Purge:
        """Create a purge of the tiers that *order* names, which has not evicted anything yet.

        Tiers of another process are not purged; its operators must request that there.
        """

    def poll(self) -> None:
        """Advance everything in flight, and call `on_fetched` for blocks that have come or failed.

        The caller polls as long as anything is in flight, and before it plans, because nothing advances by itself.
        """

    def pop_lost(self) -> Sequence[Lost]:
        """Return the blocks that no tier below has any more since the last call.

        If the device has a copy of such a block, that copy is now the last one.
        """
