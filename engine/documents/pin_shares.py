"""PinShares: how much of host memory each tenant may have kept."""

from kvtier.engine.core import EngineCore
from kvtier.engine.sharing.fair_share import FairShare
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.pins import Pin


class PinShares:
    """The pins of all tenants, of documents and of prompts, each within its tenant's equal share of the half of host
    memory that may be pinned. Whether there is room depends on the tenant's own pins alone, so it tells of no others.

    Owned by the engine's thread. *num_tenants* may be set; when there are more of them than there were, what is held
    already stays until its time is over or it is renewed.
    """

    def __init__(self, core: EngineCore, num_tenants: int) -> None:
        self._core = core
        self.num_tenants = num_tenants

    @property
    def share_bytes(self) -> int:
        """What one tenant may have kept."""
        return FairShare(self._core.cache.pinnable_bytes, self.num_tenants).each

    def pin(
        self,
        tenant: str | None,
        chain: BlockChain,
        num_tokens: int,
        *,
        until: float,
        instead_of: Pin | None = None,
    ) -> Pin | None:
        """Keep what is cached of so many tokens until then, in the place of the tenant's earlier pin *instead_of*.

        None if the tenant's share has no room; then the earlier pin stays as it was.
        """
        pins = self._core.pins
        left_bytes = self.share_bytes - pins.num_bytes(tenant)
        return pins.pin(tenant, chain, num_tokens, left_bytes, until=until, instead_of=instead_of)
