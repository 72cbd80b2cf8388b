"""IndexLoad: at the start, what is on disk already is looked through page by page, beside everything else."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.store.record import Fault
from kvtier.tiers.breaker import HUNG_S, Attempt
from kvtier.tiers.disk_tier import DiskTier
from kvtier.tiers.residency import Residency
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine


@dataclass(frozen=True, eq=False, slots=True)
class _Page:
    """One that is being read."""

    attempt: Attempt
    submitted_at: float


class IndexLoad:
    """One page at a time is under way; after a failure, or one that hangs, it begins again. Owned by the cache's
    thread."""

    def __init__(
        self, disk: DiskTier, residency: Residency, transfers: TransferEngine, clock: Callable[[], float]
    ) -> None:
        self._disk = disk
        self._residency = residency
        self._transfers = transfers
        self._clock = clock
        self._reading: _Page | None = None

    def go_on(self) -> None:
        """Have the next page read, unless that is under way or done."""
        if self._disk.index.is_loaded:
            return
        if self._reading is not None and self._clock() - self._reading.submitted_at > HUNG_S:
            self._disk.reading.hung(self._reading.attempt)
            self._disk.begin_index_again()
            self._reading = None
        attempt = self._disk.reading.begin() if self._reading is None else None
        if attempt is None:
            return
        page = _Page(attempt, self._clock())
        # First: a lane without threads reads while it is given the page.
        self._reading = page
        if not self._transfers.submit(
            Route.DISK_TO_HOST, self._disk.read_index, 0, lambda transfer: self._landed(transfer, page)
        ):
            self._reading = None
            self._disk.reading.withdrawn(attempt)

    def _landed(self, transfer: Transfer, page: _Page) -> None:
        if page is not self._reading:
            return  # it hung, and another walk has begun
        self._reading = None
        if transfer.error is None:
            self._disk.reading.succeeded(page.attempt)
            self._residency.was_on_disk(transfer.result)
            self.go_on()
        elif isinstance(transfer.error, LaneClosed):
            self._disk.reading.withdrawn(page.attempt)
        else:
            self._disk.reading.failed(page.attempt)
            self._disk.faults[Fault.IO_ERROR.value] += 1
            self._disk.begin_index_again()
