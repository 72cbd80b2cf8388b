"""DigestLane: digests of chunks in host memory, computed on other threads than the one that owns the tiers."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.store.record import digest_for_threads
from kvtier.transfer.block_memory import HostMemory
from kvtier.transfer.lane import Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

BATCH_BYTES = 8 << 20  # a millisecond's work: several threads share a request, and other requests soon have a turn
BATCH_CHUNKS = 32
MAX_IN_FLIGHT = 8  # batches in the lane; the rest waits here, where clients take turns

Deliver = Callable[[range, Sequence[bytes] | None], None]
"""A callback for each part of a request, with its places and their digests; None if they could not be computed."""


@dataclass(frozen=True, eq=False, slots=True)
class DigestBatch:
    """Slots whose digests are computed together, their places in the caller's request, and the callback."""

    memory: HostMemory
    slots: Sequence[int]
    places: range
    deliver: Deliver


class DigestLane:
    """The queue in front of a lane that computes digests. Owned by the sidecar's thread.

    Each client's batches wait in order, and the clients take turns, so that a client with much to do delays no other
    client. The caller keeps a lease on every slot until the callback for it.
    """

    def __init__(self, transfers: TransferEngine, route: Route) -> None:
        self._transfers = transfers
        self._route = route
        self._num_under_way = 0
        self._waiting: OrderedDict[object, deque[DigestBatch]] = (
            OrderedDict()
        )  # by client; the one served last comes last

    def take(self, client: object, memory: HostMemory, slots: Sequence[int], deliver: Deliver) -> None:
        """Compute the digests of these slots; *deliver* is called within a later `poll` of the transfers.

        *client* says whose turns the request uses. It is any object that is equal only to itself.
        """
        limit = max(1, min(BATCH_CHUNKS, BATCH_BYTES // memory.block_bytes))
        for start in range(0, len(slots), limit):
            places = range(start, min(start + limit, len(slots)))
            batch = DigestBatch(memory, slots[places.start : places.stop], places, deliver)
            self._waiting.setdefault(client, deque()).append(batch)
        self.pump()

    def pump(self) -> None:
        """Hand waiting batches to the lane while it has room."""
        while self._waiting and self._num_under_way < MAX_IN_FLIGHT:
            client, batches = next(iter(self._waiting.items()))
            if not self._submit(batches[0]):
                return
            batches.popleft()
            if batches:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]

    def _submit(self, batch: DigestBatch) -> bool:
        def on_taken(transfer: Transfer) -> None:
            self._num_under_way -= 1
            batch.deliver(batch.places, transfer.result if transfer.error is None else None)

        num_bytes = len(batch.slots) * batch.memory.block_bytes
        is_taken = self._transfers.submit(self._route, lambda: _digests(batch.memory, batch.slots), num_bytes, on_taken)
        self._num_under_way += is_taken
        return is_taken


def _digests(memory: HostMemory, slots: Sequence[int]) -> list[bytes]:
    """Return the digests of these slots, on the lane's thread.

    `digest_for_threads(2)` releases the GIL for each block. So the thread that answers engines does not wait for
    digests.
    """
    digest = digest_for_threads(2)
    return [digest(memory.host_block(slot)) for slot in slots]
