"""IndexLoad: loads the index of the disk's blocks, page by page, when the disk's store opens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtier.store.blob_store import StoreUnavailable
from kvtier.store.record import Fault
from kvtier.tiers.lower.breaker import HUNG_S, Attempt
from kvtier.tiers.lower.disk_tier import DiskContent
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

SLOTS_AT_ONCE = 256  # slots of host memory scanned per call: 0.1 ms of the owner's thread


@dataclass(frozen=True, eq=False, slots=True)
class _Page:
    """A page of the disk's index, which is being read from the store."""

    attempt: Attempt
    opening: int  # number of the store's opening whose index is read
    submitted_at: float


class IndexLoad:
    """The loader of the index of the disk's blocks. It loads the index each time the disk's store opens.

    The store may open late, and may be reopened with other content. On each opening, the old index is discarded and all
    pages of the new one are read, one at a time. If a page fails or hangs, loading starts over. In the end all blocks
    in host memory are offered to the disk again, because the disk may have lost its copies of them. Owned by the tiers'
    thread.
    """

    def __init__(self, index: DiskContent, transfers: TransferEngine, clock: Callable[[], float]) -> None:
        self._disk = index.disk
        self._index = index
        self._transfers = transfers
        self._clock = clock
        self._reading: _Page | None = None  # the page in flight
        self._forsaken: Iterator[None] = iter(())  # each step offers some of the host blocks to the disk again

    def go_on(self) -> None:
        """Start to load the index if the store has been opened, and read the next page unless a read is in flight."""
        if self._disk.indexed_opening != self._disk.opening():
            self._disk.follow_opening()
            self._forsaken = iter(())
            self._withdraw()
        next(self._forsaken, None)
        self._index.report_forgotten()
        self._read_page()

    def stop(self) -> None:
        """Ignore a page that is being read. Call this when the index is emptied because its blocks are evicted."""
        self._forsaken = iter(())
        self._withdraw()

    def _read_page(self) -> None:
        """Start to read the next page of the index, unless the index is loaded or a page is being read."""
        if not self._disk.is_open or self._disk.index.is_loaded:
            return
        reading = self._reading
        if (
            reading is not None
            and self._clock() - reading.submitted_at > HUNG_S
            and not self._transfers.has_undelivered
        ):
            self._disk.reading.on_hung(reading.attempt)
            self._disk.rewind_index()
            self._reading = None
        attempt = self._disk.reading.begin() if self._reading is None else None
        if attempt is None:
            return
        page = _Page(attempt, self._disk.indexed_opening, self._clock())
        # Set before `submit`, because an `InlineLane`, which has no threads, reads the page inside that call.
        self._reading = page
        if not self._transfers.submit(
            Route.DISK_TO_HOST, self._disk.read_index, 0, lambda transfer: self._on_page_read(transfer, page)
        ):
            self._reading = None
            self._disk.reading.withdraw(attempt)

    def _withdraw(self) -> None:
        """If a page is being read, ignore the outcome and start again from the first page of the disk's index."""
        if self._reading is not None:
            self._disk.reading.withdraw(self._reading.attempt)
            self._disk.rewind_index()
            self._reading = None

    def _on_page_read(self, transfer: Transfer, page: _Page) -> None:
        if page is not self._reading:
            return  # the index is being read from the start again
        if page.opening != self._disk.opening() or isinstance(transfer.error, LaneClosed | StoreUnavailable):
            self._withdraw()
            return
        self._reading = None
        if transfer.error is None:
            self._disk.reading.on_succeeded(page.attempt)
            self._index.load_index_page(transfer.result)
            if self._disk.index.is_loaded:
                self._forsaken = self._index.offer_all_to_disk(SLOTS_AT_ONCE)
            self._read_page()  # not `go_on`, whose other parts are due once per poll
        else:
            self._disk.reading.on_failed(page.attempt)
            self._disk.faults[Fault.IO_ERROR.value] += 1
            self._disk.rewind_index()
