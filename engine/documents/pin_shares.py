"""PinShares: how much of host memory each tenant may have kept."""

from collections import Counter

from kvtier.engine.core import EngineCore
from kvtier.engine.sharing.fair_share import FairShare
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.pins import Pin


class PinShares:
    """The pins of all tenants, of documents and of prompts, each within its tenant's equal share of the half of host
    memory that may be pinned. Whether there is room depends on the tenant's own pins alone, so it tells of no others.

    Owned by the engine's thread; *num_tenants* may be set by any. When there are more of them than there were, what is
    held already stays until its time is over or it is renewed.
    """

    def __init__(self, num_tenants: int) -> None:
        self.num_tenants = num_tenants
        self._bytes: Counter[str | None] = Counter()
        self._tenants: dict[Pin, str | None] = {}

    def share_bytes(self, core: EngineCore) -> int:
        """What one tenant may have kept."""
        return FairShare(core.cache.pinnable_bytes, self.num_tenants).each

    def pin(self, core: EngineCore, tenant: str | None, chain: BlockChain, num_tokens: int) -> Pin | None:
        """Keep what is cached of so many tokens, as `TieredCache.pin` does; None if the tenant's share has no room."""
        pin = core.cache.pin(chain, num_tokens, self.share_bytes(core) - self._bytes[tenant])
        if pin is not None:
            self._tenants[pin] = tenant
            self._bytes[tenant] += pin.num_bytes
        return pin

    def end(self, core: EngineCore, pin: Pin) -> None:
        """Keep it no longer; a second time does nothing."""
        core.cache.unpin(pin)
        if pin in self._tenants:
            tenant = self._tenants.pop(pin)
            self._bytes[tenant] -= pin.num_bytes
            if not self._bytes[tenant]:
                del self._bytes[tenant]
