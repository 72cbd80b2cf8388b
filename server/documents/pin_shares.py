"""PinShares: limits the pins of each tenant to its share of host memory."""

from kvtier.engine.core import EngineCore
from kvtier.engine.sharing.turns import FairShare
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.pins import Pin


class PinShares:
    """Limits on pins of documents and prompts. Half of host memory is divided equally among the tenants.

    Whether a pin is refused depends only on the tenant's own pins, so it reveals nothing about other tenants.
    *num_tenants* may be changed. If that makes shares smaller, existing pins stay until they end or are renewed. Owned
    by the engine's thread.
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
        """Pin the cached blocks of a prompt's tokens from *start* up to *num_tokens*, until the time *until*.

        The new pin replaces *instead_of*. If *start* is not 0, another pin must hold the tokens before *start*.

        Returns:
            The pin, or None if the tenant's share has no room. In that case, *instead_of* stays unchanged.
        """
        pins = self._core.pins
        left_bytes = self.share_bytes - pins.num_bytes(tenant)
        return pins.pin(tenant, chain, num_tokens, left_bytes, until=until, instead_of=instead_of, start=start)
