"""DigestLane: a queue that computes digests (checksums) of chunks in host memory on background threads."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.store.record import digest_for_threads
from kvtier.transfer.block_memory import HostMemory
from kvtier.transfer.lane import Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

BATCH_BYTES = 8 << 20  # about 1 ms of work: several threads can share a request, and other requests do not wait long
BATCH_CHUNKS = 32
MAX_IN_FLIGHT = 8  # batches given to the threads; further batches wait in `DigestLane`, where clients take turns

IsNeeded = Callable[[range], bool]
"""A callback that returns whether the digests of a part of a request, given by the places of its slots, are needed."""

Deliver = Callable[[range, Sequence[bytes] | None], None]
"""A callback for a part of a request: the places of its slots, and their digests or None if the computation failed."""


@dataclass(frozen=True, eq=False, slots=True)
class DigestBatch:
    """Some slots of a caller's request, whose digests are computed together, and the callback for the result.

    *places* has the positions of these slots in the request. If *is_needed* returns False for them when their turn
    comes, the digests are not computed, and *deliver* is not called.
    """

    memory: HostMemory
    slots: Sequence[int]
    places: range
    deliver: Deliver
    is_needed: IsNeeded


class DigestLane:
    """A queue of chunks whose digests background threads compute. Owned by the sidecar's thread.

    Each client's chunks are processed in batches, in order. Clients take turns, so that a client with many chunks does
    not delay the others. If the caller ends its lease on a slot before the callback for the slot has been called, it
    must ignore the slot's digest.
    """

    def __init__(self, transfers: TransferEngine, route: Route) -> None:
        self._transfers = transfers
        self._route = route
        self.max_in_flight = MAX_IN_FLIGHT  # takes effect with the next batch
        self._num_under_way = 0
        self._waiting: OrderedDict[object, deque[DigestBatch]] = (
            OrderedDict()
        )  # by client; the one served last comes last

    def take(
        self,
        client: object,
        memory: HostMemory,
        slots: Sequence[int],
        deliver: Deliver,
        is_needed: IsNeeded = lambda places: True,
    ) -> None:
        """Queue the chunks in these slots. *deliver* gets their digests later.

        A later `poll` of the transfers calls *deliver*, once for each batch of slots. *client* is the client for which
        the digests are computed. Any object that is compared by identity can stand for a client. *is_needed* is called
        when a batch's turn comes. If it returns False, the batch is dropped.
        """
        limit = max(1, min(BATCH_CHUNKS, BATCH_BYTES // memory.block_bytes))
        for start in range(0, len(slots), limit):
            places = range(start, min(start + limit, len(slots)))
            batch = DigestBatch(memory, slots[places.start : places.stop], places, deliver, is_needed)
            self._waiting.setdefault(client, deque()).append(batch)
        self.pump()

    def pump(self) -> None:
        """Submit queued batches of chunks to the background threads, until `max_in_flight` batches are in flight."""
        while self._waiting and self._num_under_way < self.max_in_flight:
            client, batches = next(iter(self._waiting.items()))
            if batches[0].is_needed(batches[0].places) and not self._submit(batches[0]):
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
    """Return the digests of the chunks in these slots. Runs on a background thread.

    The digest function releases the GIL for each block, so that the thread that answers engines is not delayed.
    """
    digest = digest_for_threads(2)
    return [digest(memory.host_block(slot)) for slot in slots]
