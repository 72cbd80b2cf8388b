"""PinShares: pins for tenants, each within its share of host memory."""

from kvtier.engine.core import EngineCore
from kvtier.engine.sharing.turns import FairShare
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.pins import Pin


class PinShares:
    """Pins of documents and prompts. Tenants have equal shares of the half of host memory that may be pinned.

    Whether there is room depends on the tenant's own pins alone, so it reveals nothing about other tenants.
    *num_tenants* may be changed. Pins beyond a smaller share stay until they end or are renewed. Owned by the engine's
    thread.
    """

    def __init__(self, core: EngineCore, num_tenants: int) -> None:
        self._core = core
        self.num_tenants = num_tenants

    @property
    def share_bytes(self) -> int:
        """Number of bytes that one tenant may pin."""
        return FairShare(self._core.cache.pins.max_bytes, self.num_tenants).each

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
        """Pin the cached blocks of tokens *start* to *num_tokens*, and end the tenant's earlier pin *instead_of*.

        Another pin of the tenant must keep the tokens before *start*. The pin ends at the time *until*.

        Returns:
            None if the tenant's share has no room; the earlier pin then stays as it was.
        """
        pins = self._core.pins
        left_bytes = self.share_bytes - pins.num_bytes(tenant)
        return pins.pin(tenant, chain, num_tokens, left_bytes, until=until, instead_of=instead_of, start=start)
