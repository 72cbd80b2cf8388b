"""DigestLane: digests of chunks in host memory, taken beside the owner's thread."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.store.record import digest_among
from kvtier.transfer.host_memory import HostMemory
from kvtier.transfer.lane import Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

BATCH_BYTES = 8 << 20  # a millisecond's work: the lane's threads share what one request has, and another's comes soon
BATCH_CHUNKS = 32
MOST_GIVEN = 8  # batches that the lane has at a time: enough for its threads until this one looks again

Deliver = Callable[[range, Sequence[bytes] | None], None]
"""Told of each part of what was asked for: which places, and their digests, None if they could not be taken."""


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Slots on their way, the caller's places of them, and whom to tell."""

    memory: HostMemory
    slots: Sequence[int]
    places: range
    deliver: Deliver


class DigestLane:
    """What the lane is not given yet waits here. Callers have turns, a batch each: who has asked for little does not
    wait for all of who has asked for much. The caller keeps a lease on every slot until it is told of it. Owned by the
    sidecar's thread."""

    def __init__(self, transfers: TransferEngine, route: Route) -> None:
        self._transfers = transfers
        self._route = route
        self._waiting: deque[deque[Batch]] = deque()  # by call of `take`, in the order of their turns
        self._num_given = 0

    def take(self, memory: HostMemory, slots: Sequence[int], deliver: Deliver) -> None:
        """Have the digests of these slots taken; *deliver* is called within a later `poll` of the transfers."""
        most = max(1, min(BATCH_CHUNKS, BATCH_BYTES // memory.block_bytes))
        batches: deque[Batch] = deque()
        for start in range(0, len(slots), most):
            places = range(start, min(start + most, len(slots)))
            batches.append(Batch(memory, slots[places.start : places.stop], places, deliver))
        if batches:
            self._waiting.append(batches)
        self.pump()

    def pump(self) -> None:
        """Hand waiting batches to the lane while it has room."""
        while self._waiting and self._num_given < MOST_GIVEN and self._submit(self._waiting[0][0]):
            batches = self._waiting.popleft()
            batches.popleft()
            if batches:
                self._waiting.append(batches)

    def _submit(self, batch: Batch) -> bool:
        def on_taken(transfer: Transfer) -> None:
            self._num_given -= 1
            batch.deliver(batch.places, transfer.result if transfer.error is None else None)

        num_bytes = len(batch.slots) * batch.memory.block_bytes
        if not self._transfers.submit(self._route, lambda: _digests(batch.memory, batch.slots), num_bytes, on_taken):
            return False
        self._num_given += 1
        return True


def _digests(memory: HostMemory, slots: Sequence[int]) -> list[bytes]:
    """What the lane does. As if several did it: the interpreter's lock is given up, so that the owner's thread, which
    answers engines, waits for no digest."""
    digest = digest_among(2)
    return [digest(memory.host_block(slot)) for slot in slots]
