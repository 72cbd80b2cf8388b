"""Probes of a tier whose reads are suspended, with a block that no request waits for."""

from collections.abc import Callable

from kvtier.store.record import Fault
from kvtier.tiers.lower.breaker import HUNG_S, Attempt
from kvtier.tiers.lower.reads import Readable
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import TransferEngine

Block = tuple[int, BlockName]  # group and name


class ReadProbe:
    """A reader of single blocks from a tier that has rested; after a success, lookups find the tier's blocks again.

    Probes read into their own memory, so that a hung probe keeps a lane's thread but no slot. Each probe uses a
    different block than those that hang. Owned by the tiers' thread.
    """

    def __init__(
        self,
        source: Readable,
        block_bytes: Callable[[int], int],
        transfers: TransferEngine,
        clock: Callable[[], float],
    ) -> None:
        self._source = source
        self._block_bytes = block_bytes
        self._transfers = transfers
        self._clock = clock
        self._under_way: dict[Block, tuple[Attempt, float]] = {}  # with its submission time

    def go_on(self) -> None:
        """Start a probe if one is due, and report hung probes to the circuit breaker."""
        source = self._source
        if source.is_readable:
            return
        for earlier, since in self._under_way.values():
            if self._clock() - since > HUNG_S and not self._transfers.has_undelivered:
                source.reading.on_hung(earlier)
        block = source.find_any(besides=self._under_way) if source.reading.allows() else None
        attempt = None if block is None else source.reading.begin()
        if block is None or attempt is None:
            return
        key, memory = source.key(*block), memoryview(bytearray(self._block_bytes(block[0])))
        self._under_way[block] = attempt, self._clock()
        if not self._transfers.submit(
            source.route,
            lambda: source.read([key], [memory]),
            0,  # bytes: a probe must not count in the tier's measured speed
            lambda transfer: self._on_probed(block, transfer),
        ):
            del self._under_way[block]
            source.reading.withdraw(attempt)

    def _on_probed(self, block: Block, transfer: Transfer) -> None:
        source = self._source
        attempt, _ = self._under_way.pop(block)
        (outcome,) = transfer.result if transfer.error is None else [Fault.IO_ERROR]
        if isinstance(transfer.error, LaneClosed):
            source.reading.withdraw(attempt)
        elif outcome is Fault.IO_ERROR:
            source.reading.on_failed(attempt)
        else:
            source.reading.on_succeeded(attempt)
        if isinstance(outcome, Fault) and not isinstance(transfer.error, LaneClosed):
            source.on_failed(*block, outcome)
