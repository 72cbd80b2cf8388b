"""PromptPins: prompts whose callers asked that they be kept in host memory for a while after they were answered."""

import time
from collections.abc import Callable, Sequence

from kvtier.engine.core import EngineCore
from kvtier.engine.pin_shares import PinShares
from kvtier.tiers.block_hash import ExtraKeys
from kvtier.tiers.holds import Hold

PIN_S = 3600.0  # if the caller does not say for how long


class PromptPins:
    """Holds with an end, within each tenant's share. Owned by the engine's thread."""

    def __init__(self, shares: PinShares, clock: Callable[[], float] = time.monotonic) -> None:
        self._shares = shares
        self._clock = clock
        self._until: dict[Hold, float] = {}

    def pin(
        self, core: EngineCore, tenant: str | None, token_ids: Sequence[int], extra: ExtraKeys, ttl_s: float
    ) -> bool:
        """Keep what is cached of the prompt for so long; False if the tenant's share has no room for that."""
        hold = self._shares.hold(core, tenant, core.chain(token_ids, extra), len(token_ids))
        if hold is not None:
            self._until[hold] = self._clock() + ttl_s
        return hold is not None

    def look(self, core: EngineCore) -> None:
        """End the pins whose time is over."""
        for hold in [hold for hold, until in self._until.items() if self._clock() >= until]:
            self._shares.end(core, hold)
            del self._until[hold]
