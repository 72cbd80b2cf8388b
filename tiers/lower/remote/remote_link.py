"""RemoteLink: connects `LocalTiers` to a remote tier, for reads, writes, lookups and probes."""

from collections.abc import Callable, Sequence

from kvtier.tiers.lower.copies import CleanAhead
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.lower.lower_tiers import Inquiry
from kvtier.tiers.lower.reads import ReadProbe, Reads
from kvtier.tiers.lower.remote.inquiries import Inquiries
from kvtier.tiers.lower.remote.remote_spill import RemoteSpill
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.lower.remote.remote_tier import RemoteTier
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.block_memory import HostMemory
from kvtier.transfer.transfer_engine import Route, TransferEngine


class RemoteSource:
    """A remote store as a source of blocks for host memory; implements `ReadSource`.

    Blocks from a remote store are new on this machine. So they are offered to its disk like computed blocks.
    """

    tier = Tier.REMOTE
    route = Route.REMOTE_TO_HOST

    def __init__(self, remote: RemoteTier, index: LowerIndex) -> None:
        self._index = index
        self.reading = remote.reading
        self.key = remote.key
        self.read = remote.read
        self.find_any = remote.presence.find_any
        self.on_failed = remote.on_read_failed

    def on_hung(self, group_id: int, name: BlockName) -> None:
        """Do nothing: while reads hang, the circuit breaker is open, and lookups find nothing in the store."""

    def on_come(self, group_id: int, slots: Sequence[int], is_late: bool) -> None:
        self._index.offer_to_disk(group_id, slots)


class RemoteLink:
    """The connection of `LocalTiers` to a remote tier. Owned by the tiers' thread."""

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
        """Create the connection.

        Blocks are read into clean host slots, whose old blocks need not be written to disk first. *windows* says how
        many slots of each group to search for clean ones. *is_host_cleaned* returns whether writes to disk are in
        flight, which make more slots clean.
        """
        source = RemoteSource(remote, index)
        self._speed = transfers.speed(source.route)
        self.reads = Reads(index, source, memories, transfers, windows, is_host_cleaned, clock)
        self._remote = remote
        self._inquiries = Inquiries(remote, index.forgets, transfers, clock)
        self._spill = RemoteSpill(index, remote, memories, transfers, clock)
        self._probe = ReadProbe(source, [memory.block_bytes for memory in memories].__getitem__, transfers, clock)
        # These are methods of `RemoteSpill`, and of its copies.
        self.want = self._spill.want
        self.on_come = self._spill.on_come
        self.spill = self._spill.spill
        self.num_leases = self._spill.copies.num_leases

    def inquire(self, group_id: int, names: Sequence[BlockName]) -> Inquiry:
        """Ask the store which of the blocks *names* it has; see `LowerHints.inquire`."""
        self._spill.on_missed(group_id, names)
        return self._inquiries.begin(group_id, names)

    def go_on(self) -> None:
        """End queries to the store that take too long, and test whether a failed store works again."""
        self._inquiries.go_on()
        self._probe.go_on()

    @property
    def is_writing(self) -> bool:
        """True if any blocks are being written to the store."""
        return bool(self._spill.copies.batches)

    def clear(self) -> None:
        """Forget the store's answers and the blocks still to be written. The records in the store stay."""
        self._remote.presence.clear()
        self._spill.clear()

    def statistics(self) -> RemoteStatistics:
        """Return the statistics of the remote tier."""
        return self._remote.statistics(self._spill.num_wanted, self._speed.latency_s)
