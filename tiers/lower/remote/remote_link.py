"""The connection between the local tiers and a remote one: reads, writes, lookups and probes."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.lower.clean_ahead import CleanAhead
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.lower.lower_tiers import NOTHING_TO_ASK, Inquiry
from kvtier.tiers.lower.read_probe import ReadProbe
from kvtier.tiers.lower.reads import Reads
from kvtier.tiers.lower.remote.inquiries import Inquiries
from kvtier.tiers.lower.remote.remote_spill import RemoteSpill
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.lower.remote.remote_tier import RemoteTier
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.block_memory import HostMemory
from kvtier.transfer.transfer_engine import Route, TransferEngine


class RemoteSource:
    """A remote store as a source of reads; implements `ReadSource`.

    Blocks from there are new on this machine, so they are offered to its disk like computed blocks.
    """

    tier = Tier.REMOTE
    route = Route.REMOTE_TO_HOST

    def __init__(self, remote: RemoteTier, index: LowerIndex) -> None:
        self._remote = remote
        self._index = index
        self.reading = remote.reading
        self.key = remote.key
        self.read = remote.read
        self.find_any = remote.presence.find_any
        self.on_failed = remote.on_read_failed

    @property
    def is_readable(self) -> bool:
        return self._remote.is_readable

    def on_hung(self, group_id: int, name: BlockName) -> None:
        """Do nothing: while reads hang, the breaker is open and lookups find nothing in the store."""

    def on_come(self, group_id: int, slots: Sequence[int], is_late: bool) -> None:
        self._index.offer_to_disk(group_id, slots)


class Link(Protocol):
    """The part of a remote tier that `LocalTiers` uses."""

    @property
    def reads(self) -> dict[Tier, Reads]:
        """The reads from the remote tier, by tier; empty if there is none."""

    def inquire(self, group_id: int, names: Sequence[BlockName]) -> Inquiry:
        """Ask about *names*, see `LowerTiers.inquire`; the first of them is one that no nearer tier has."""

    def want(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Mark blocks to be put because they were used a second time, a prefix's front first."""

    def on_come(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Handle blocks that have come to host memory from the device, a prefix's tail first."""

    def spill(self) -> None:
        """Start to put wanted blocks."""

    def go_on(self) -> None:
        """Continue questions and probes."""

    def num_leases(self, pool: BlockPool) -> int:
        """Return how many host slots of the pool are being put."""

    @property
    def is_writing(self) -> bool:
        """Whether any host slots are being put."""

    def clear(self) -> None:
        """Forget what is known of the store and what was to be put; shared records stay in the store."""

    def statistics(self) -> RemoteStatistics | None:
        """Return everything counted; None if there is no remote tier."""


class RemoteLink:
    """The connection to an existing remote tier; implements `Link`. Owned by the tiers' thread."""

    def __init__(
        self,
        remote: RemoteTier,
        index: LowerIndex,
        memories: Sequence[HostMemory],
        transfers: TransferEngine,
        windows: Sequence[CleanAhead],
        is_host_cleaned: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """Create the connection; *windows* and *is_host_cleaned* as in `Reads`."""
        source = RemoteSource(remote, index)
        self._speed = transfers.speed(source.route)
        self.reads = {Tier.REMOTE: Reads(index, source, memories, transfers, windows, is_host_cleaned, clock)}
        self._remote = remote
        self._inquiries = Inquiries(remote, index.forgets, transfers, clock)
        self._spill = RemoteSpill(index, remote, memories, transfers, clock)
        self._probe = ReadProbe(source, [memory.block_bytes for memory in memories].__getitem__, transfers, clock)
        self.want = self._spill.want
        self.on_come = self._spill.on_come
        self.spill = self._spill.spill
        self.num_leases = self._spill.copies.num_leases

    def inquire(self, group_id: int, names: Sequence[BlockName]) -> Inquiry:
        self._spill.on_missed(group_id, names)
        return self._inquiries.begin(group_id, names)

    def go_on(self) -> None:
        self._inquiries.go_on()
        self._probe.go_on()

    @property
    def is_writing(self) -> bool:
        return bool(self._spill.copies.batches)

    def clear(self) -> None:
        self._remote.presence.clear()
        self._spill.clear()

    def statistics(self) -> RemoteStatistics:
        return self._remote.statistics(self._spill.num_wanted, self._speed.latency_s)


class NoLink:
    """The connection of tiers without a remote one; implements `Link`."""

    is_writing = False

    def __init__(self) -> None:
        self.reads: dict[Tier, Reads] = {}

    def inquire(self, group_id: int, names: Sequence[BlockName]) -> Inquiry:
        return NOTHING_TO_ASK

    def want(self, group_id: int, names: Sequence[BlockName]) -> None:
        pass

    def on_come(self, group_id: int, names: Sequence[BlockName]) -> None:
        pass

    def spill(self) -> None:
        pass

    def go_on(self) -> None:
        pass

    def num_leases(self, pool: BlockPool) -> int:
        return 0

    def clear(self) -> None:
        pass

    def statistics(self) -> None:
        return None
