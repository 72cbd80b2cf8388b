"""LookAhead: brings from disk what waiting requests will need, while they wait."""

from collections.abc import Callable
from itertools import islice

from kvtier.engine.scheduling.request import Request
from kvtier.engine.scheduling.waiting_queue import WaitingQueue
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.pins import Pin

NUM_REQUESTS = 64  # at the head of the queue


class LookAhead:
    """Pins what is cached of the first waiting prompts in host memory, in the order of the queue, up to a budget: a
    long queue must not flush host memory. Each prompt is looked up once. Owned by the engine's thread.
    """

    def __init__(self, cache: TieredCache, most_bytes: int, clock: Callable[[], float], lasts_s: float) -> None:
        """*lasts_s*: so long a prompt in the queue keeps host memory; after that it takes its chance."""
        self._cache = cache
        self._most_bytes = most_bytes
        self._clock = clock
        self._lasts_s = lasts_s
        self._pins: dict[Request, tuple[Pin | None, float]] = {}  # and until when; None: nothing to pin, or too late

    @property
    def num_bytes(self) -> int:
        """Of host memory pinned for the queue."""
        return sum(pin.num_bytes for pin, _ in self._pins.values() if pin is not None)

    def look(self, waiting: WaitingQueue) -> None:
        """Begin to pin what one more prompt needs, if the budget allows; end what has lasted too long."""
        for request, (pin, until) in self._pins.items():
            if pin is not None and self._clock() >= until:
                self._cache.unpin(pin)
                self._pins[request] = None, until
        for request in islice(waiting, NUM_REQUESTS):
            if request not in self._pins:
                self._begin(request)
                return

    def forget(self, request: Request) -> None:
        """The request waits no longer: what was held for it is its promotion's now, or nobody's."""
        pin, _ = self._pins.pop(request, (None, 0.0))
        if pin is not None:
            self._cache.unpin(pin)

    def _begin(self, request: Request) -> None:
        left = min(self._most_bytes - self.num_bytes, self._cache.free_to_pin)
        if left <= 0:
            return
        pin = None
        if request.options.reads_cache:
            request.chain.extend(request.token_ids)
            hit = self._cache.lookup(request.chain, len(request.token_ids))
            if self._cache.on_device(hit).num_tokens < hit.num_tokens:
                pin = self._cache.pin(request.chain, hit.num_tokens, left)
                if pin is None:
                    return  # its turn comes when others have gone, and nobody's before
        self._pins[request] = pin, self._clock() + self._lasts_s
