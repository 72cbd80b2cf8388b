"""PromptPins: prompts whose callers asked that they be kept in host memory for a while after they were answered."""

import time
from collections.abc import Callable, Sequence

from kvtier.engine.core import EngineCore
from kvtier.tiers.block_hash import ExtraKeys
from kvtier.tiers.holds import Hold

PIN_S = 3600.0  # if the caller does not say for how long


class PromptPins:
    """Holds with an end. Owned by the engine's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[Hold, float] = {}

    def pin(self, core: EngineCore, token_ids: Sequence[int], extra: ExtraKeys, ttl_s: float) -> bool:
        """Keep what is cached of the prompt for so long; False if host memory has no room for that."""
        hold = core.cache.hold(core.chain(token_ids, extra), len(token_ids))
        if hold is not None:
            self._until[hold] = self._clock() + ttl_s
        return hold is not None

    def look(self, core: EngineCore) -> None:
        """End the pins whose time is over."""
        for hold in [hold for hold, until in self._until.items() if self._clock() >= until]:
            core.cache.end_hold(hold)
            del self._until[hold]
