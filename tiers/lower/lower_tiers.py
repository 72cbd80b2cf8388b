"""LowerTiers: the interface of the tiers below the device (host memory, disk, remote), with its types."""

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
"""The place of each block of a list: the number of its host slot, ON_DISK, ON_REMOTE, or NOWHERE (in no tier)."""


class Inquiry(Protocol):
    """A lookup in a tier that cannot answer at once, for example the remote tier."""

    @property
    def is_done(self) -> bool:
        """True if waiting should stop, because `LowerTiers.find` knows the answer or the answer would come too late."""


class Answered:
    """An inquiry that is done from the start, because no tier has to be asked; implements `Inquiry`."""

    is_done = True


class AllOf:
    """Several lookups in a slow tier as one `Inquiry`, which is done when all of them are done."""

    def __init__(self, inquiries: Sequence[Inquiry]) -> None:
        self._inquiries = inquiries

    @property
    def is_done(self) -> bool:
        return all(inquiry.is_done for inquiry in self._inquiries)


NOTHING_TO_ASK = Answered()


def names_at(names: Sequence[BlockName], places: Ids) -> Sequence[BlockName]:
    """Return the names at the indices *places*. The indices are distinct and ascending."""
    return names if len(places) == len(names) else [names[i] for i in places.tolist()]


def are_kept(places: Places) -> npt.NDArray[np.bool_]:
    """Return for each place whether it is in host memory or on disk, so that the device's copy is not the last one.

    A block that only a remote store has does not count, because other machines may evict it.
    """
    kept: npt.NDArray[np.bool_] = (places >= 0) | (places == ON_DISK)
    return kept


def are_cold(places: Places) -> npt.NDArray[np.bool_]:
    """Return for each place whether it is on disk or remote, so that the block must be read into host memory first."""
    cold: npt.NDArray[np.bool_] = (places == ON_DISK) | (places == ON_REMOTE)
    return cold


class Lost(NamedTuple):
    """Blocks of one attention group that no tier below the device has any more.

    *tier* was the last tier that had them, and *cause* is why it evicted them.
    """

    group_id: int
    names: Sequence[BlockName]
    tier: Tier
    cause: EvictionCause


class Fetch(Protocol):
    """A request for blocks of one attention group, with leases on them in host memory.

    A leased block stays in its host slot. The lease begins when the block is in host memory, and ends with `release`.
    The caller of `LowerTiers.fetch` must release every block, including those that it no longer waits for. Otherwise
    their slots are never free again. The tiers do not guarantee a block's bytes, so the caller must compare the bytes
    that it copies out of a slot with the block's digest.
    """

    @property
    def group_id(self) -> int:
        """Attention group of the blocks."""

    @property
    def slots(self) -> Places:
        """Host slot leased for each block; ABSENT until the block is in host memory, and after its release."""

    @property
    def failures(self) -> Mapping[int, Reason]:
        """Reasons why blocks could not be fetched, by the block's index in the fetch."""

    def digest(self, place: int) -> bytes:
        """Return the digest of the leased block with index *place*.

        It was computed when the block's bytes came to host memory or were written to disk.
        """

    def tenant(self, place: int) -> bytes:
        """Return the tenant of the leased block with index *place*."""

    def release(self, places: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """End the leases on the blocks with the indices *places*.

        Release the last blocks of a prefix first, so that they are evicted first. If a block is not in host memory yet,
        `on_fetched` is not called for it any more. Its read is canceled, unless the read has begun or another fetch
        wants the block. Releasing a block twice has no effect.
        """

    def time_out(self) -> None:
        """Give up the reads that this fetch waits for, and treat them as hung.

        The tier that they read from is then suspended for a while, and other fetches from it fail too. Otherwise every
        later request would wait just as long. Has no effect if the fetch waits for no block.
        """


OnFetched = Callable[[Fetch, int, Reason | None], None]
"""Callback `on_fetched(fetch, place, failure)`: the block with index *place* is leased, or *failure* is why not.

Called inside `LowerTiers.poll`, once for each block that was not leased when `fetch` returned, except released blocks.
"""


@dataclass(frozen=True, slots=True)
class SpillProgress:
    """The progress of `LowerHints.spill`: blocks already copied to its target, and blocks still to be copied.

    The target is a tier that outlives this process: the disk, or the host memory of a sidecar.
    """

    has_target: bool = False  # whether there is a target
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
    """When blocks are read from a colder tier: at once, or only while no read with priority NOW is waiting."""

    NOW = auto()
    LATER = auto()


class Deletion(Enum):
    """State of the deletion of records on disk, after `LowerTiers.clear`.

    In every state, lookups of this process find none of the blocks. But if the process ends before all records have
    been deleted, the next process finds the remaining ones.
    """

    DONE = auto()  # no records are left to be deleted
    IN_PROGRESS = auto()
    FAILING = auto()  # the store could not delete them; polls retry about once per second


@dataclass(frozen=True, slots=True)
class Clearing:
    """Progress of the work that `LowerTiers.clear` leaves to later polls."""

    deletion: Deletion = Deletion.DONE
    num_in_flight: int = 0  # transfers in flight for the deletion
    is_losing: bool = False  # whether `pop_lost` has yet to return some of the evicted blocks


NOT_CLEARING = Clearing()


class LowerStatus(Protocol):
    """The current state of the tiers below the device. Reading the state changes nothing."""

    @property
    def num_slots(self) -> Sequence[int]:
        """Number of slots of host memory, by attention group; all 0 if there is no host memory. Never changes."""

    @property
    def host_bytes(self) -> int:
        """Size of host memory for all groups together; 0 while a sidecar that holds it is not connected."""

    @property
    def num_changes(self) -> int:
        """Counter of changes to the content of host slots.

        While it is unchanged, the host slots returned by `find` still hold those blocks.
        """

    @property
    def epoch(self) -> int:
        """Counter of events in which blocks may have left the tiers below without a report by `pop_lost`.

        When it has grown, the caller must look up its blocks again to know which of them still have a copy below.
        """

    @property
    def is_indexed(self) -> bool:
        """True if all blocks that were stored before this process started are in the index.

        Until then, `find` does not find some of them.
        """

    @property
    def is_readable(self) -> bool:
        """True unless reads from disk are suspended after failures, or a sidecar that has the tiers is not connected.

        While this is False, lookups do not find the blocks that cannot be read.
        """

    @property
    def is_making_room(self) -> bool:
        """True if copies to disk that will free host slots are in flight and not overdue."""

    @property
    def clearing(self) -> Clearing:
        """Progress of the work that the last `LowerTiers.clear` has left to later polls."""

    def read_speed(self, tier: Tier) -> LaneSpeed:
        """Return how fast blocks were recently read from *tier*."""

    def queued_read_bytes(self, tier: Tier) -> int:
        """Return the number of bytes being read from *tier*, or queued to be read with priority NOW."""

    def spill_progress(self) -> SpillProgress:
        """Return the progress of `LowerHints.spill`."""

    def statistics(self) -> LowerStatistics:
        """Return everything counted below the device."""

    def check(self) -> None:
        """Raise AssertionError if the indexes and counts disagree. For tests, and for servers when they are idle."""


class LowerHints:
    """Optional requests to the tiers below the device. An implementation of `LowerTiers` may ignore them.

    This base class ignores all of them. Owned by the tiers' thread.
    """

    @property
    def can_ask(self) -> bool:
        """True if `inquire` may find more blocks than `LowerTiers.find`, because some tier cannot answer at once."""
        return False

    def inquire(self, group_id: int, names: Sequence[BlockName]) -> Inquiry:
        """Query the tiers that cannot answer at once, such as the remote tier, for the blocks *names*.

        *names* are the rest of a prefix, from the first block that `LowerTiers.find` did not find. The inquiry is done
        at once, or in a later poll within about a tenth of a second.
        """
        return NOTHING_TO_ASK

    def evict_last(self, group_id: int, places: Places) -> None:
        """Make the blocks in these host slots the last to be evicted, because a request will need them.

        *places* are the places of a prefix's blocks, in order; those that are not host slots are ignored. Call this
        only while `LowerStatus.num_changes` is unchanged since the lookup, because later a slot may hold another block.
        """

    def spill(self) -> None:
        """Start copying blocks from host memory to the colder tiers that should have them.

        While a request waits for blocks to be read, only copies that make room for these blocks are started.
        """

    def make_room(self) -> None:
        """Start copying blocks from host memory to disk, but only if host slots are needed.

        Host slots are needed if few are free for reads, or if `LowerTiers.reserve` has returned fewer than requested
        since the last call. Call this instead of `spill` while a load to the device is running, or device slots are
        being freed for it. The other writes to disk that `spill` starts would slow the load down.
        """


class LowerTiers(Protocol):
    """The tiers below the device. The caller finds blocks by name, leases their host slots, and copies the bytes.

    Both sides map the memory of the host slots. Only names, slot numbers, digests and counts pass through this
    interface. It knows nothing of device slots, tensors, models or requests.

    Ownership: one thread makes all calls. A slot leased by `fetch` or `reserve` belongs to the caller until it is
    released, published or abandoned. Until then its bytes do not change, whatever happens in the tiers. A block without
    a lease may be evicted between any two calls. All blocks without a lease may even be lost at once
    (`LowerStatus.epoch`).

    Time: no call except `clear` waits for a copy, a disk or another process. If the blocks are in another process,
    calls are answered from that process's last report. So `find` may be outdated, and `reserve` may return fewer slots
    than are free. A fetch may begin without leases, which are then added by later polls, in any order.

    Failure: no method raises an exception because a tier fails. If a block becomes unavailable, `find` returns NOWHERE,
    `pop_lost` returns the block, or `Fetch.failures` has a reason. A block that cannot be written stays where it is.
    """

    @property
    def status(self) -> LowerStatus:
        """State of the tiers, always current."""

    @property
    def hints(self) -> LowerHints:
        """Optional requests to the tiers, which may ignore them."""

    def find(self, group_id: int, names: Sequence[BlockName]) -> Places:
        """Return where the blocks of *names* are. They are not leased, so the result may be outdated at the next call.

        Does not change the eviction order and does not block. Takes up to half a microsecond per block (DESIGN.md,
        sections 7 and 10).
        """

    def find_run(self, group_id: int, names: Sequence[BlockName]) -> Places:
        """Return the result of `find` for the leading blocks, up to the first one that no tier has."""

    def fetch(
        self,
        group_id: int,
        blocks: NamedBlocks,
        on_fetched: OnFetched,
        found: Places | None = None,
        priority: ReadPriority = ReadPriority.NOW,
    ) -> Fetch:
        """Lease these blocks in host memory. Blocks that are only in colder tiers are first read into host memory.

        The caller must release the leases. Blocks that are in host memory may be leased when this returns (see
        `Fetch.slots`). For every other block, *on_fetched* is called later, with a reason if the block is
        unavailable.

        Args:
            group_id: Group of the blocks.
            blocks: Blocks to lease.
            on_fetched: Called for each block that is leased later or cannot be leased.
            found: Host slots of all blocks as returned by `find`, to save another lookup. They are not checked. If a
                slot held another block by now, the wrong block would be leased, and its digest would match. So pass the
                slots only directly after `find`, or while `LowerStatus.num_changes` is unchanged. An implementation may
                ignore them.
            priority: When to read the blocks that are only in colder tiers.
        """

    def reserve(self, group_id: int, num_slots: int) -> list[int]:
        """Lease up to *num_slots* host slots to copy blocks into. The caller must `publish` or `abandon` each of them.

        Evicts the oldest blocks, preferably those with a copy on disk. Blocks without a copy on disk are evicted only
        while the disk accepts no blocks. Returns fewer slots, or none, if there is no room; try again after a poll.
        """

    def publish(
        self, group_id: int, slots: Ids, rows: Sequence[NamedSpan], digests: Sequence[bytes], owners: OwnerNumbers
    ) -> None:
        """Make the blocks in these reserved slots findable and end the leases. Call this when the bytes are complete.

        If another host slot already holds one of the blocks, that copy is kept, and the reserved slot becomes free.

        Args:
            group_id: Group of the blocks.
            slots: Reserved slots.
            rows: Names of the blocks in the order of *slots*. Each `NamedSpan` has consecutive blocks of one prompt,
                the last block first.
            digests: Digests of the blocks' bytes, in the same order.
            owners: Tenants of the blocks, in the same order.
        """

    def abandon(self, group_id: int, slots: Ids) -> None:
        """End the leases on reserved slots into which no blocks were copied."""

    def refresh(self, group_id: int, names: Sequence[BlockName], were_read: Sequence[bool]) -> None:
        """Record that blocks were used, so that host memory evicts them after all others, in the order of *names*.

        Blocks that are no longer in host memory are ignored. *were_read* says for each block whether it was read from
        disk (empty: no block was). The use of a block that was read from disk is recorded there too.
        """

    def forget(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Drop corrupt blocks, whose bytes do not match their digests, from host memory, and count them.

        Copies on disk stay.
        """

    def clear(self) -> bool:
        """Forget every block in all tiers below, and end every fetch.

        Later lookups find none of these blocks. Later polls release the leases of the fetches, delete the records on
        disk (see `LowerStatus.clearing`), and let `pop_lost` return the blocks: at most `NUM_GHOSTS` from host memory,
        and at most `NUM_GHOSTS` that were only on disk.

        Returns:
            False if host slots are reserved or being read into, if blocks are being written to disk or to the remote
            tier, or if the disk is known to fail. Then nothing is forgotten.
        """

    def purge(self, order: PurgeOrder) -> Purge:
        """Create a purge of the tiers that *order* names. It evicts nothing until its parts run.

        Tiers that belong to another process are not purged; request their purge from that process.
        """

    def poll(self) -> None:
        """Advance all work in flight, and call `on_fetched` for the blocks that were fetched or failed.

        Nothing advances without this call. Call it regularly while anything is in flight, and before planning loads.
        """

    def pop_lost(self) -> Sequence[Lost]:
        """Return the blocks that have disappeared from all tiers below since the last call.

        If the device has a copy of such a block, that copy is now the last one.
        """
