"""IndexLoad: at the start, what is on disk already is looked through page by page, beside everything else."""

from kvtier.store.record import Fault
from kvtier.tiers.breaker import Attempt
from kvtier.tiers.disk_tier import DiskTier
from kvtier.tiers.residency import Residency
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine


class IndexLoad:
    """One page at a time is under way; after a failure it begins again. Owned by the cache's thread."""

    def __init__(self, disk: DiskTier, residency: Residency, transfers: TransferEngine) -> None:
        self._disk = disk
        self._residency = residency
        self._transfers = transfers
        self._is_reading = False

    def go_on(self) -> None:
        """Have the next page read, unless that is under way or done."""
        if self._disk.index.is_loaded or self._is_reading:
            return
        attempt = self._disk.reading.begin()
        if attempt is None:
            return
        self._is_reading = self._transfers.submit(
            Route.DISK_TO_HOST, self._disk.read_index, 0, lambda transfer: self._landed(transfer, attempt)
        )
        if not self._is_reading:
            self._disk.reading.withdrawn(attempt)

    def _landed(self, transfer: Transfer, attempt: Attempt) -> None:
        self._is_reading = False
        if transfer.error is None:
            self._disk.reading.succeeded(attempt)
            self._residency.was_on_disk(transfer.result)
            self.go_on()
        elif isinstance(transfer.error, LaneClosed):
            self._disk.reading.withdrawn(attempt)
        else:
            self._disk.reading.failed(attempt)
            self._disk.faults[Fault.IO_ERROR.value] += 1
            self._disk.begin_index_again()
