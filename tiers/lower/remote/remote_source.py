"""RemoteSource: the remote tier as blocks are read from it."""

from collections.abc import Sequence

from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.lower.remote.remote_tier import RemoteTier
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.transfer_engine import Route


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
