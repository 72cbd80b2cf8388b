"""PinShares: pins for tenants, each within its share of host memory."""

from kvtier.engine.core import EngineCore
from kvtier.engine.sharing.turns import FairShare
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.pins import Pin


class PinShares:
    """Pins documents and prompts of each tenant within its equal share of the half of host memory that may be pinned.

    Whether there is room depends on the tenant's own pins alone, so it tells nothing of other tenants. Owned by the
    engine's thread. *num_tenants* may be set; when it grows, pins beyond the new share stay until they end or are
    renewed.
    """

    def __init__(self, core: EngineCore, num_tenants: int) -> None:
        self._core = core
        self.num_tenants = num_tenants

    @property
    def share_bytes(self) -> int:
        """Bytes that one tenant may have pinned."""
        return FairShare(self._core.cache.pinnable_bytes, self.num_tenants).each

    def pin(
        self,
        tenant: str | None,
        chain: BlockChain,
        num_tokens: int,
        *,
        until: float,
        instead_of: Pin | None = None,
        start: int = 0,
    ) -> Pin | None:
        """Keep what is cached of so many tokens until then, in the place of the tenant's earlier pin *instead_of*;
        without what comes before token *start*, which another pin of the tenant's keeps.

        None if the tenant's share has no room; then the earlier pin stays as it was.
        """
        pins = self._core.pins
        left_bytes = self.share_bytes - pins.num_bytes(tenant)
        return pins.pin(tenant, chain, num_tokens, left_bytes, until=until, instead_of=instead_of, start=start)
