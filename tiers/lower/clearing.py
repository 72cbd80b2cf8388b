"""RecordDeletion: deletes the records on disk that are no longer in the index, in the background."""

from collections.abc import Callable, Sequence

from kvtier.tiers.lower.breaker import HUNG_S
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.transfer.lane import Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

REST_S = 1.0  # pause after an error of the disk


class RecordDeletion:
    """Deletes the records that are on disk but not in the index, page by page.

    To evict all blocks, the caller first empties the index, so that this process no longer finds the records on disk.
    Then they are deleted in the background, because a later process would find them. Records that are written meanwhile
    are in the index and are not deleted. Owned by the tiers' thread.
    """

    def __init__(self, disk: DiskTier, transfers: TransferEngine, clock: Callable[[], float]) -> None:
        self._disk = disk
        self._transfers = transfers
        self._clock = clock
        self.is_done = True  # whether all records that were on disk at the last call of `begin` have been deleted
        self._has_failed = False  # whether the last read or deletion has failed; this object then pauses
        self._submitted_at = 0.0  # when the transfer in flight was submitted
        self._round = 0  # number of calls of `begin`
        self._is_under_way = False
        self._was_opened_anew = False
        self._not_before = float("-inf")

    def begin(self) -> None:
        """Start a new deletion. Call this when the index has just been emptied."""
        self.is_done = not self._disk.is_there
        self._has_failed = False
        self._not_before = float("-inf")  # a pause after an error is not that of a new deletion
        self._round += 1
        self._disk.rewind_index()

    def go_on(self) -> None:
        """Start to read the next page of the store's keys, unless a read or a deletion is in flight."""
        if self.is_done or self._is_under_way or self._clock() < self._not_before:
            return
        if self._disk.indexed_opening != self._disk.opening():
            self._was_opened_anew = True
            self._disk.follow_opening()
            self._disk.index.empty()
        if not self._disk.is_open:
            return
        number, self._submitted_at = self._round, self._clock()
        self._is_under_way = self._transfers.submit(
            Route.DISK_TO_HOST, self._disk.read_index, 0, lambda transfer: self._on_page(transfer, number)
        )

    @property
    def is_failing(self) -> bool:
        """True if the last read or deletion has failed, or if the one in flight hangs."""
        hangs = self._is_under_way and self._clock() - self._submitted_at > HUNG_S
        return self._has_failed or hangs

    @property
    def num_in_flight(self) -> int:
        """Number of transfers in flight."""
        return int(self._is_under_way)

    def _on_page(self, transfer: Transfer, number: int) -> None:
        """Delete the records of a page. *number* is that of the round (see `_round`) in which the page was read."""
        self._is_under_way = False
        if transfer.error is not None:
            self._rest()
            return
        if number != self._round:  # `begin` was called meanwhile: start again from the first page
            self._disk.rewind_index()
            return
        self._has_failed = False
        keys: Sequence[bytes] = transfer.result
        if not keys:
            self.is_done = True
            if self._was_opened_anew:  # reload the index, and then write the blocks that the reopened store lacks
                self._was_opened_anew, self._disk.indexed_opening = False, 0
            return
        self._submitted_at = self._clock()
        unknown = [key for key in keys if self._is_unknown(key)]
        self._is_under_way = bool(unknown) and self._transfers.submit(
            Route.HOST_TO_DISK, lambda: self._disk.delete(unknown), 0, self._on_deleted
        )
        if unknown and not self._is_under_way:
            self._rest()

    def _on_deleted(self, transfer: Transfer) -> None:
        self._is_under_way = False
        if transfer.error is not None:
            self._rest()

    def _is_unknown(self, key: bytes) -> bool:
        block = self._disk.block_of(key)
        return block is not None and not self._disk.index.holds(*block)

    def _rest(self) -> None:
        """Pause after an error, and then start again from the first page."""
        self._has_failed = True
        self._disk.rewind_index()
        self._not_before = self._clock() + REST_S
