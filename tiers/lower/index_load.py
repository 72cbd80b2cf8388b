"""IndexLoad: what is on disk when its store opens is looked through page by page, beside everything else."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtier.store.blob_store import StoreUnavailable
from kvtier.store.record import Fault
from kvtier.tiers.lower.breaker import HUNG_S, Attempt
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

SLOTS_AT_ONCE = 256  # of host memory that are looked at in one call: 0.1 ms of the owner's thread


@dataclass(frozen=True, eq=False, slots=True)
class _Page:
    """One that is being read."""

    attempt: Attempt
    opening: int
    submitted_at: float


class IndexLoad:
    """Goes by the store's openings: it may open late, and be opened anew with other content.

    Then what was known of it is forgotten, all pages are read, one at a time, from the first again if one fails or
    hangs, and blocks above that relied on a copy there are to be copied again. Owned by the cache's thread.
    """

    def __init__(self, index: LowerIndex, transfers: TransferEngine, clock: Callable[[], float]) -> None:
        self._disk = index.disk
        self._index = index
        self._transfers = transfers
        self._clock = clock
        self._reading: _Page | None = None
        self._forsaken: Iterator[None] = iter(())  # host blocks whose copies are gone, some at each step

    def go_on(self) -> None:
        """Take in that the store was opened or is gone; have the next page read, unless that is under way or done."""
        if self._disk.taken_in != self._disk.opening():
            self._disk.take_in_opening()
            self._forsaken = iter(())
            self._withdraw()
        next(self._forsaken, None)
        self._index.forget_some_of_disk()
        if not self._disk.is_open or self._disk.index.is_loaded:
            return
        if self._reading is not None and self._clock() - self._reading.submitted_at > HUNG_S:
            self._disk.reading.on_hung(self._reading.attempt)
            self._disk.rewind_index()
            self._reading = None
        attempt = self._disk.reading.begin() if self._reading is None else None
        if attempt is None:
            return
        page = _Page(attempt, self._disk.taken_in, self._clock())
        # First: a lane without threads reads while it is given the page.
        self._reading = page
        if not self._transfers.submit(
            Route.DISK_TO_HOST, self._disk.read_index, 0, lambda transfer: self._on_page_read(transfer, page)
        ):
            self._reading = None
            self._disk.reading.withdraw(attempt)

    def _withdraw(self) -> None:
        """Let the page that is being read tell nothing any more."""
        if self._reading is not None:
            self._disk.reading.withdraw(self._reading.attempt)
            self._disk.rewind_index()
            self._reading = None

    def _on_page_read(self, transfer: Transfer, page: _Page) -> None:
        if page is not self._reading:
            return  # another walk has begun
        if page.opening != self._disk.opening() or isinstance(transfer.error, LaneClosed | StoreUnavailable):
            self._withdraw()
            return
        self._reading = None
        if transfer.error is None:
            self._disk.reading.on_succeeded(page.attempt)
            self._index.load_index_page(transfer.result)
            if self._disk.index.is_loaded:
                self._forsaken = self._index.mark_uncopied(SLOTS_AT_ONCE)
            self.go_on()
        else:
            self._disk.reading.on_failed(page.attempt)
            self._disk.faults[Fault.IO_ERROR.value] += 1
            self._disk.rewind_index()
