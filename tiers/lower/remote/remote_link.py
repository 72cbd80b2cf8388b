"""RemoteLink: all that goes on between these tiers and a remote one."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.lower.clean_ahead import CleanAhead
from kvtier.tiers.lower.inquiry import NOTHING_TO_ASK, Inquiry
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.lower.read_probe import ReadProbe
from kvtier.tiers.lower.reads import Reads
from kvtier.tiers.lower.remote.inquiries import Inquiries
from kvtier.tiers.lower.remote.remote_spill import RemoteSpill
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.lower.remote.remote_tier import RemoteTier
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.host_memory import HostMemory
from kvtier.transfer.transfer_engine import Route, TransferEngine


class RemoteSource:
    """See `ReadSource`: a store that machines share. What comes from there is new on this machine, and goes to its disk
    as what was computed here does."""

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
        """Nothing: while reads hang the breaker is open, and nothing is found there."""

    def on_come(self, group_id: int, slots: Sequence[int], is_late: bool) -> None:
        self._index.offer_to_disk(group_id, slots)


class Link(Protocol):
    """What `LocalTiers` has of a remote tier."""

    @property
    def reads(self) -> dict[Tier, Reads]:
        """The reads from it, by its name; empty if there is none."""

    def inquire(self, group_id: int, names: Sequence[BlockName]) -> Inquiry:
        """See `LowerTiers.inquire`; *names* from the first on that nothing nearer has."""

    def want(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Have blocks put that were used a second time, a prefix's front first."""

    def on_come(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Take in that blocks have come to host memory from the device, a prefix's tail first."""

    def spill(self) -> None:
        """Start to put what is wanted."""

    def go_on(self) -> None:
        """Go on with questions and probes."""

    def num_leases(self, pool: BlockPool) -> int:
        """Host slots of the pool that are being put."""

    @property
    def is_writing(self) -> bool:
        """Whether host slots are being put."""

    def clear(self) -> None:
        """Forget what is known of the store, and what was to be put. What is there stays: it is others' too."""

    def statistics(self) -> RemoteStatistics | None:
        """Everything counted, by value; None if there is no remote tier."""


class RemoteLink:
    """See `Link`. Owned by the tiers' thread."""

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
        """*windows* and *is_host_cleaned*: see `Reads`."""
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
    """See `Link`: of tiers without a remote one."""

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
