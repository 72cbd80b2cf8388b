"""IndexLoad: what is on disk when its store opens is looked through page by page, beside everything else."""

from collections.abc import Iterator

from kvtier.store.blob_store import StoreUnavailable
from kvtier.store.record import Fault
from kvtier.tiers.breaker import Attempt
from kvtier.tiers.disk_tier import DiskTier
from kvtier.tiers.residency import Residency
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

SLOTS_AT_ONCE = 256  # of device and host that are looked at in one call: 0.1 ms of the owner's thread


class IndexLoad:
    """Goes by the store's openings: it may open late, and be opened anew with other content.

    Then what was known of it is forgotten, all pages are read, one at a time, from the first again if one fails, and
    blocks above that relied on a copy there are to be copied again. Owned by the cache's thread.
    """

    def __init__(self, disk: DiskTier, residency: Residency, transfers: TransferEngine) -> None:
        self._disk = disk
        self._residency = residency
        self._transfers = transfers
        self._is_reading = False
        self._forsaken: Iterator[None] = iter(())  # blocks above whose copies are gone, some at each step

    def go_on(self) -> None:
        """Take in that the store was opened or is gone; have the next page read, unless that is under way or done."""
        if self._disk.taken_in != self._disk.opening():
            self._residency.disk_changed()
            self._forsaken = iter(())
        next(self._forsaken, None)
        if not self._disk.is_open or self._disk.index.is_loaded or self._is_reading:
            return
        attempt = self._disk.reading.begin()
        if attempt is None:
            return
        opening = self._disk.taken_in
        self._is_reading = self._transfers.submit(
            Route.DISK_TO_HOST, self._disk.read_index, 0, lambda transfer: self._landed(transfer, attempt, opening)
        )
        if not self._is_reading:
            self._disk.reading.withdrawn(attempt)

    def _landed(self, transfer: Transfer, attempt: Attempt, opening: int) -> None:
        self._is_reading = False
        is_in_vain = isinstance(transfer.error, LaneClosed | StoreUnavailable)
        if is_in_vain or opening != self._disk.opening() or opening != self._disk.taken_in:
            self._disk.reading.withdrawn(attempt)
            self._disk.begin_index_again()
        elif transfer.error is None:
            self._disk.reading.succeeded(attempt)
            self._residency.was_on_disk(transfer.result)
            if self._disk.index.is_loaded:
                self._forsaken = self._residency.mark_uncopied(SLOTS_AT_ONCE)
            self.go_on()
        else:
            self._disk.reading.failed(attempt)
            self._disk.faults[Fault.IO_ERROR.value] += 1
            self._disk.begin_index_again()
