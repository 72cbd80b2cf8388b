"""TimedPins: keeps prefixes of waiting requests, answered prompts and documents in host memory for a limited time."""

from collections import Counter
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush
from itertools import count

from kvtier.tiers.cache import TieredCache
from kvtier.tiers.device.cleared_blocks import Leftovers
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.pins import Pin

MAX_ENDED = 4  # pins to end per tick: a pin may hold thousands of blocks
_MAX_STALE = 64  # stale heap entries to keep, in addition to as many as there are pins


class TimedPins:
    """Prefixes that are kept in host memory until their time is over, or until they are unpinned.

    Pinned bytes are counted by owner, so that each owner can stay within its share. Owned by the engine's thread, which
    calls `tick` after every step.
    """

    def __init__(self, cache: TieredCache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._owners: dict[Pin, Hashable] = {}  # pins that have not ended
        self._ends: dict[Pin, float] = {}  # of the same pins
        self._num_bytes: Counter[Hashable] = Counter()  # by owner
        self._by_end: list[tuple[float, int, Pin]] = []  # a heap; the number orders pins with equal ends
        self._numbers = count()
        self._leftovers = Leftovers()

    def now(self) -> float:
        """Return the current time on the clock of the pins."""
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
        """Keep the cached blocks of a prefix in host memory until the time *until*; see `Pins.pin`.

        Args:
            owner: Owner of the pin, to which its bytes are counted.
            chain: Names of the prompt's blocks.
            num_tokens: Length of the prefix.
            max_bytes: Maximum size of the pin, in bytes beyond the size of *instead_of*. If None, the maximum size is
                `Pins.free_bytes`.
            until: Time on the clock of `now`.
            instead_of: Earlier pin of *owner*, which the new pin replaces.
            start: First token to pin. Another pin of *owner* must keep the blocks before that token.

        Returns:
            The new pin, or None if it would be too large. Then *instead_of* is unchanged.
        """
        if max_bytes is not None and instead_of in self._owners:
            max_bytes += instead_of.num_bytes
        pin = self._cache.pins.pin(chain, num_tokens, max_bytes, start)
        if pin is not None:
            if instead_of is not None:
                self.unpin(instead_of)
            self._owners[pin] = owner
            self._num_bytes[owner] += pin.num_bytes
            self._end_at(pin, until)
        return pin

    def prolong(self, pin: Pin, until: float) -> None:
        """Extend the pin to the time *until*. Do nothing if the pin already lasts longer or has ended."""
        if pin in self._owners and until > self._ends[pin]:
            self._end_at(pin, until)

    def has(self, pin: Pin) -> bool:
        """Return whether the pin has not ended."""
        return pin in self._owners

    def unpin(self, pin: Pin) -> None:
        """End the pin before its time. Ignore a pin that has ended."""
        if pin in self._owners:
            self._cache.pins.unpin(pin)
            owner = self._owners.pop(pin)
            del self._ends[pin]
            self._num_bytes[owner] -= pin.num_bytes
            if not self._num_bytes[owner]:
                del self._num_bytes[owner]

    def forget_all(self) -> None:
        """Forget all pins, after `Pins.end_all` has ended them. Later ticks free the memory of their records."""
        for former in (self._owners, self._ends, self._by_end):
            self._leftovers.add(former)
        self._owners, self._ends, self._by_end = {}, {}, []
        self._num_bytes.clear()

    def num_bytes(self, owner: Hashable) -> int:
        """Return the bytes of host memory that the owner's pins take once all their blocks are loaded."""
        return self._num_bytes[owner]

    @property
    def num_remembered(self) -> int:
        """Number of end times in memory. For a while, these include outdated ones of ended or extended pins."""
        return len(self._by_end)

    def tick(self) -> None:
        """End up to `MAX_ENDED` of the pins whose time is over."""
        self._leftovers.free_some()
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
