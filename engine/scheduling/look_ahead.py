"""The prefetch of waiting requests' cached prefixes from disk to host memory."""

from collections.abc import Callable
from itertools import islice

from kvtier.engine.scheduling.request import Request
from kvtier.engine.scheduling.timed_pins import TimedPins
from kvtier.engine.scheduling.waiting_queue import WaitingQueue
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.pins import Pin

NUM_REQUESTS = 64  # requests at the head of the queue to prefetch for


class LookAhead:
    """A prefetcher: it loads the cached prefixes of waiting prompts into host memory and pins them there.

    Prompts are processed in queue order, each one once. A byte budget keeps a long queue from evicting everything else
    from host memory. Owned by the engine's thread.
    """

    def __init__(self, cache: TieredCache, pins: TimedPins, max_bytes: Callable[[], int], lasts_s: float) -> None:
        """Create a prefetcher that has pinned nothing yet.

        *max_bytes* returns the current budget in bytes. A pin ends after *lasts_s* seconds, even if its prompt still
        waits; then the pinned blocks may be evicted.
        """
        self._cache = cache
        self._timed = pins
        self._max_bytes = max_bytes
        self._lasts_s = lasts_s
        self._pins: dict[Request, Pin | None] = {}  # None: the request had nothing to pin

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that are pinned for waiting requests."""
        return self._timed.num_bytes(self)

    def look(self, waiting: WaitingQueue) -> None:
        """Pin the prefix of the next prompt that has not been processed yet, if the byte budget allows."""
        for request in islice(waiting, NUM_REQUESTS):
            if request not in self._pins:
                self._begin(request)
                return

    def forget(self, request: Request) -> None:
        """End the pin of a request that left the queue. If the request started, its load keeps the blocks instead."""
        pin = self._pins.pop(request, None)
        if pin is not None:
            self._timed.unpin(pin)

    def _begin(self, request: Request) -> None:
        left = min(self._max_bytes() - self.num_bytes, self._cache.pins.free_bytes)
        if left <= 0:
            return
        pin = None
        if request.reads_cache:
            request.chain.extend(request.token_ids)
            hit = self._cache.lookup(request.chain, len(request.token_ids))
            if self._cache.plans.on_device(hit).num_tokens < hit.num_tokens:
                until = self._timed.now() + self._lasts_s
                pin = self._timed.pin(self, request.chain, hit.num_tokens, left, until=until)
                if pin is None:
                    return  # retried when pins have ended; no later request goes first
        self._pins[request] = pin
