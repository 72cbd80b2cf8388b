"""DiskPurge: evicts records from the disk at an operator's request, in small parts."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvtier.store.record import NAMESPACE_BYTES
from kvtier.tiers.lower.disk_tier import DiskTier, Dropped
from kvtier.tiers.lower.purge import PurgeOrder
from kvtier.transfer.lane import Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

MAX_EVICTED = 256  # records per part; processing their eviction takes a millisecond of the owner's thread
ALL_BYTES = 1 << 62  # no limit


class DiskPurge:
    """A purge of the disk, requested by an operator. Owned by the tiers' thread; a copy thread deletes the records.

    Records are evicted in the store's eviction order. If the purge is limited to a namespace, the store is scanned
    instead, and records are evicted in the order of the scan.
    """

    def __init__(
        self,
        disk: DiskTier,
        transfers: TransferEngine,
        on_gone: Callable[[Sequence[bytes]], None],
        order: PurgeOrder,
    ) -> None:
        """Create a purge that has not started. *on_gone* is called with evicted keys, in the tiers' thread."""
        self._disk = disk
        self._transfers = transfers
        self._on_gone = on_gone
        self._order = order
        self._outcome: Transfer | None = None
        self.num_evicted = 0
        self.num_bytes = 0
        self.why_not = ""

    def parts(self) -> Iterator[bool]:
        """Evict records part by part (see `Purge.parts`), until all selected records are evicted or the disk fails."""
        if not self._disk.is_open:
            self.why_not = "the disk is not open"
            return
        walk: list[Iterator[bytes]] = []
        is_last = False
        while not is_last and self._max_bytes > 0 and self._max_blocks > 0:
            self._outcome = None
            if not self._transfers.submit(Route.HOST_TO_DISK, self._work(walk), 0, self._on_outcome):
                yield False  # the lane is full
                continue
            while (outcome := self._outcome) is None:
                yield False
            if outcome.error is not None:
                self.why_not = " ".join(str(outcome.error).split()) or type(outcome.error).__name__
                return
            dropped: Dropped
            dropped, is_last = outcome.result
            self._take_in(dropped)
            yield True

    @property
    def _max_bytes(self) -> int:
        return ALL_BYTES if self._order.max_bytes is None else self._order.max_bytes - self.num_bytes

    @property
    def _max_blocks(self) -> int:
        limit = self._order.max_blocks
        return MAX_EVICTED if limit is None else min(MAX_EVICTED, limit - self.num_evicted)

    def _work(self, walk: list[Iterator[bytes]]) -> Callable[[], tuple[Dropped, bool]]:
        """Return a function that evicts the next part, for a copy thread to call.

        The function returns what it has evicted, and whether this was the last part. *walk* is a list, empty for the
        first part. A scan of the store puts its iterator over the keys there, to continue it in the next part.
        """
        disk, prefix = self._disk, self._order.namespace
        num_bytes, limit, tenant = self._max_bytes, self._max_blocks, self._order.tenant or b""
        if prefix is None:

            def evict() -> tuple[Dropped, bool]:
                dropped = disk.evict(num_bytes, limit, tenant)
                return dropped, not dropped.num_bytes

            return evict

        def drop() -> tuple[Dropped, bool]:
            if not walk:
                walk.append(disk.walk())
            page = list(islice(walk[0], limit))
            meant = [key for key in page if key[:NAMESPACE_BYTES].hex().startswith(prefix)]
            return disk.drop(meant), not page

        return drop

    def _on_outcome(self, transfer: Transfer) -> None:
        self._outcome = transfer

    def _take_in(self, dropped: Dropped) -> None:
        self._disk.on_written(dropped.written)
        self._on_gone(dropped.written.evicted)
        self.num_evicted += len(dropped.written.evicted)
        self.num_bytes += dropped.num_bytes
