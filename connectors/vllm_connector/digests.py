"""`Digests`: digests of blocks in host slots, computed on threads other than vLLM's scheduler."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

from kvtier.store.record import digest_for_threads
from kvtier.transfer.block_memory import HostMemory

NUM_THREADS = 2
BATCH_BYTES = 8 << 20  # per task, so that the threads share the blocks of one prompt
BATCH_BLOCKS = 32

OnTaken = Callable[[range, Sequence[bytes] | None], None]
"""Callback with the indices of a part of the slots and their digests, or None if the digests could not be computed."""


class Digests:
    """A calculator of digests of host slots, on a pool of threads.

    The digests are passed to a callback. The caller must keep the slots leased until then.
    """

    def __init__(self, threads: Executor, run: Callable[[Callable[[], None]], None]) -> None:
        """Create an object that computes digests on *threads*.

        When digests are ready, one of these threads passes a function to *run*, which must call it, for example under
        a lock.
        """
        self._threads = threads
        self._run = run

    def take(self, memory: HostMemory, slots: Sequence[int], on_taken: OnTaken) -> None:
        """Start to compute the digests of *slots* in batches. *on_taken* is called once for each batch."""
        limit = max(1, min(BATCH_BLOCKS, BATCH_BYTES // memory.block_bytes))
        for start in range(0, len(slots), limit):
            places = range(start, min(start + limit, len(slots)))
            taken = self._threads.submit(_digests, memory, slots[places.start : places.stop])
            taken.add_done_callback(lambda done, places=places: self._on_done(done, places, on_taken))  # type: ignore[misc]

    def _on_done(self, done: "Future[list[bytes]]", places: range, on_taken: OnTaken) -> None:
        def tell() -> None:
            on_taken(places, None if done.cancelled() or done.exception() is not None else done.result())

        self._run(tell)


def _digests(memory: HostMemory, slots: Sequence[int]) -> list[bytes]:
    digest = digest_for_threads(NUM_THREADS)
    return [digest(memory.host_block(slot)) for slot in slots]
