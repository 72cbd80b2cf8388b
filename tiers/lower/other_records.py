"""OtherRecords: writes records that are not KV blocks, such as rows of images, to the store of the disk tier."""

from collections.abc import Callable, Iterable, Sequence

from kvtier.store.blob_store import Blob, StoreFull
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.naming.tier import EvictionCause
from kvtier.transfer.lane import Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine


class OtherRecords:
    """Writes of records that are not KV blocks to the store of the disk tier, and their deletion.

    The records and the blocks share the store's capacity and its eviction order. They also share the daily write
    budget, except the budget's reserve for reused blocks. If a write evicts blocks, the disk's index learns this with
    the outcome of the write, as it does for a write of blocks. Owned by the tiers' thread.
    """

    def __init__(
        self,
        disk: DiskTier,
        transfers: TransferEngine,
        on_evicted: Callable[[Sequence[bytes], EvictionCause], None],
    ) -> None:
        """Use the store of *disk*. *on_evicted* is called with the keys that a write has evicted, and the cause."""
        self._disk = disk
        self._transfers = transfers
        self._on_evicted = on_evicted

    def put(
        self, make_blob: Callable[[], Blob], num_bytes: int, on_done: Callable[[BaseException | None], None]
    ) -> bool:
        """Start to write the record that *make_blob* returns, which has *num_bytes* bytes.

        A copy thread calls *make_blob*. A later poll of the transfers calls *on_done* with the error, or None.

        Returns:
            False, with nothing started, if the write budget lacks the bytes, if the disk is failing, or if too many
            writes are queued.
        """
        disk = self._disk
        if disk.is_failing or not disk.budget.spares(num_bytes) or (attempt := disk.writing.begin()) is None:
            return False

        def deliver(transfer: Transfer) -> None:
            match transfer.error:
                case None:
                    disk.writing.on_succeeded(attempt)
                    cause = disk.on_written(transfer.result)
                    self._on_evicted(transfer.result.evicted, cause)
                case StoreFull() as error:
                    disk.writing.on_failed(attempt)
                    self._on_evicted(error.evicted, EvictionCause.ROOM)
                case OSError():
                    disk.writing.on_failed(attempt)
                case _:  # not started, or a record that the store cannot hold: this says nothing about the disk
                    disk.writing.withdraw(attempt)
            on_done(transfer.error)

        if not self._transfers.submit(Route.HOST_TO_DISK, lambda: disk.write([make_blob()]), num_bytes, deliver):
            disk.writing.withdraw(attempt)
            return False
        return True

    def delete(self, prefix: bytes, on_done: Callable[[BaseException | None], None]) -> bool:
        """Start to delete the records whose keys begin with *prefix*; see `put` for *on_done*.

        Returns:
            False, with nothing started, if the disk is not open or too many writes are queued.
        """
        disk = self._disk

        def delete() -> None:
            keys: Iterable[bytes] = disk.walk()
            disk.delete([key for key in keys if key.startswith(prefix)])

        return disk.is_open and self._transfers.submit(
            Route.HOST_TO_DISK, delete, 0, lambda transfer: on_done(transfer.error)
        )

    def wait(self, timeout_s: float) -> None:
        """Wait up to *timeout_s* for a transfer to finish, and deliver what has finished."""
        self._transfers.poll(timeout_s)
