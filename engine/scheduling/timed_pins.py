"""TimedPins: keeps prefixes of waiting requests, answered prompts and documents in host memory until a time."""

from collections import Counter
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush
from itertools import count

from kvtier.tiers.cache import TieredCache
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.pins import Pin

MAX_ENDED = 4  # in one tick: a pin may hold thousands of blocks
_MAX_STALE = 64  # entries of the heap, beside as many as there are pins, whose pin has ended before its time


class TimedPins:
    """Pins that end when their time is over, or earlier when they are unpinned.

    Their bytes are counted by owner, so that each owner can stay within its share. Owned by the engine's thread, which
    calls `tick` after every step.
    """

    def __init__(self, cache: TieredCache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._owners: dict[Pin, Hashable] = {}  # of the pins that have not ended
        self._ends: dict[Pin, float] = {}  # of the same pins
        self._num_bytes: Counter[Hashable] = Counter()  # by owner
        self._by_end: list[tuple[float, int, Pin]] = []  # a heap; the number tells pins with the same end apart
        self._numbers = count()

    def now(self) -> float:
        """The time on the clock by which pins end."""
        return self._clock()

    def pin(
        self,
        owner: Hashable,
        chain: BlockChain,
        num_tokens: int,
        max_bytes: int | None = None,
        *,
        until: float,
        instead_of: Pin | None = None,
        start: int = 0,
    ) -> Pin | None:
        """Keep the cached blocks of the first *num_tokens* until *until*, a time by `now`, as `TieredCache.pin` does;
        without those before token *start*, which another pin of *owner*'s keeps.

        The new pin takes the place of *instead_of*, an earlier pin of *owner*'s. None if the new pin needs more than
        *max_bytes* beside the other pins of *owner*; then *instead_of* stays as it was.
        """
        if max_bytes is not None and instead_of in self._owners:
            max_bytes += instead_of.num_bytes
        pin = self._cache.pin(chain, num_tokens, max_bytes, start)
        if pin is not None:
            if instead_of is not None:
                self.unpin(instead_of)
            self._owners[pin] = owner
            self._num_bytes[owner] += pin.num_bytes
            self._end_at(pin, until)
        return pin

    def prolong(self, pin: Pin, until: float) -> None:
        """Have the pin end at *until*, a time by `now`, and not before; one that has ended already is left alone."""
        if pin in self._owners and until > self._ends[pin]:
            self._end_at(pin, until)

    def has(self, pin: Pin) -> bool:
        """Whether the pin has not ended."""
        return pin in self._owners

    def unpin(self, pin: Pin) -> None:
        """End the pin before its time; a pin that has ended already is left alone."""
        if pin in self._owners:
            self._cache.unpin(pin)
            owner = self._owners.pop(pin)
            del self._ends[pin]
            self._num_bytes[owner] -= pin.num_bytes
            if not self._num_bytes[owner]:
                del self._num_bytes[owner]

    def unpin_all(self) -> None:
        """End every pin."""
        for pin in list(self._owners):
            self.unpin(pin)

    def num_bytes(self, owner: Hashable) -> int:
        """Bytes of host memory that the owner's pins take when they are whole."""
        return self._num_bytes[owner]

    @property
    def num_remembered(self) -> int:
        """Number of ends in the heap: those of all pins, and for a while earlier ones, of pins that ended before their
        time or were prolonged."""
        return len(self._by_end)

    def tick(self) -> None:
        """End up to `MAX_ENDED` of the pins whose time is over."""
        now, num_ended = self._clock(), 0
        while self._by_end and now >= self._by_end[0][0] and num_ended < MAX_ENDED:
            end, _, pin = heappop(self._by_end)
            if self._ends.get(pin) == end:
                num_ended += 1
                self.unpin(pin)

    def _end_at(self, pin: Pin, until: float) -> None:
        self._ends[pin] = until
        if len(self._by_end) >= 2 * len(self._owners) + _MAX_STALE:
            self._by_end = [entry for entry in self._by_end if self._ends.get(entry[2]) == entry[0]]
            heapify(self._by_end)
        heappush(self._by_end, (until, next(self._numbers), pin))
