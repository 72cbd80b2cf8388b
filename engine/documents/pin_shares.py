"""PinShares: how much of host memory each tenant may have kept."""

from collections import Counter

from kvtier.engine.core import EngineCore
from kvtier.engine.sharing.fair_share import FairShare
from kvtier.tiers.holds import Hold
from kvtier.tiers.naming.block_hash import BlockChain


class PinShares:
    """The pins of all tenants, of documents and of prompts, each within its tenant's equal share of the half of host
    memory that may be held. Whether there is room depends on the tenant's own pins alone, so it tells of no others.

    Owned by the engine's thread; *num_tenants* may be set by any. When there are more of them than there were, what is
    held already stays until its time is over or it is renewed.
    """

    def __init__(self, num_tenants: int) -> None:
        self.num_tenants = num_tenants
        self._bytes: Counter[str | None] = Counter()
        self._tenants: dict[Hold, str | None] = {}

    def share_bytes(self, core: EngineCore) -> int:
        """What one tenant may have kept."""
        return FairShare(core.cache.holdable_bytes, self.num_tenants).each

    def hold(self, core: EngineCore, tenant: str | None, chain: BlockChain, num_tokens: int) -> Hold | None:
        """Keep what is cached of so many tokens, as `TieredCache.hold` does; None if the tenant's share has no room."""
        hold = core.cache.hold(chain, num_tokens, self.share_bytes(core) - self._bytes[tenant])
        if hold is not None:
            self._tenants[hold] = tenant
            self._bytes[tenant] += hold.num_bytes
        return hold

    def end(self, core: EngineCore, hold: Hold) -> None:
        """Keep it no longer; a second time does nothing."""
        core.cache.end_hold(hold)
        if hold in self._tenants:
            tenant = self._tenants.pop(hold)
            self._bytes[tenant] -= hold.num_bytes
            if not self._bytes[tenant]:
                del self._bytes[tenant]
