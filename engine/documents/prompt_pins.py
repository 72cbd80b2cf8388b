"""PromptPins: prompts whose callers asked that they be kept in host memory for a while after they were answered."""

import time
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count

from kvtier.engine.core import EngineCore
from kvtier.engine.documents.pin_shares import PinShares
from kvtier.tiers.naming.block_hash import ExtraKeys
from kvtier.tiers.pins import Pin

PIN_S = 3600.0  # if the caller does not say for how long
MOST_ENDED = 4  # in one step: a pin may hold thousands of blocks


class PromptPins:
    """Pins with an end, within each tenant's share. Owned by the engine's thread."""

    def __init__(self, shares: PinShares, clock: Callable[[], float] = time.monotonic) -> None:
        self._shares = shares
        self._clock = clock
        self._by_end: list[tuple[float, int, Pin]] = []  # a heap; the number tells those with one end apart
        self._numbers = count()

    def pin(
        self, core: EngineCore, tenant: str | None, token_ids: Sequence[int], extra: ExtraKeys, ttl_s: float
    ) -> bool:
        """Keep what is cached of the prompt for so long; False if the tenant's share has no room for that, or the
        prompt has no block that could be kept."""
        pin = self._shares.pin(core, tenant, core.chain(token_ids, extra), len(token_ids))
        if pin is None:
            return False
        if not pin.num_bytes:
            self._shares.end(core, pin)
            return False
        heappush(self._by_end, (self._clock() + ttl_s, next(self._numbers), pin))
        return True

    def tick(self, core: EngineCore) -> None:
        """End pins whose time is over, in each step a few."""
        now = self._clock()
        for _ in range(MOST_ENDED):
            if not self._by_end or now < self._by_end[0][0]:
                return
            self._shares.end(core, heappop(self._by_end)[2])
