"""KeptPrefixes: beginnings of prompts that stay in host memory until they have not been read for a while."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.engine.core import EngineCore
from kvtier.engine.documents.pin_shares import PinShares
from kvtier.tiers.naming.block_hash import BlockChain, BlockName
from kvtier.tiers.pins import Pin


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A place in a prompt: what comes before it is to be kept until it has not been read for *ttl_s* seconds."""

    num_tokens: int  # before the breakpoint
    ttl_s: float


@dataclass(eq=False, slots=True)
class _Kept:
    start: int  # tokens before it, which are kept already: the end of a prefix that this one begins with
    end: int  # of the prefix
    ttl_s: float
    pin: Pin  # of the tokens in between


class KeptPrefixes:
    """Pins prefixes within each tenant's share. Owned by the engine's thread.

    A prefix is pinned from the end of the longest kept one that it begins with, so what both have counts once. A prefix
    lasts as long as every one that continues it: who reads these reads it too, and its ttl is the longest of theirs.
    """

    def __init__(self, core: EngineCore, shares: PinShares) -> None:
        self._core = core
        self._shares = shares
        self._kept: dict[str | None, dict[BlockName, _Kept]] = {}  # by tenant and the name of the last block

    def keep(self, tenant: str | None, chain: BlockChain, breakpoints: Sequence[Breakpoint]) -> list[Breakpoint]:
        """Keep a prompt up to its *breakpoints*, which come in their order; those up to which it is kept now.

        They are moved back to the end of a block. The tenant's prefixes that the prompt begins with count as read. A
        breakpoint within the first block is left out, and so is one for which the tenant's share has no room.
        """
        self._forget_ended()
        path = self._begun_with(tenant, chain)
        kept = []
        for each in breakpoints:
            end = self._core.cache.whole_tokens(chain, each.num_tokens)
            if end and self._keep_up_to(end, each.ttl_s, tenant, chain, path):
                kept.append(Breakpoint(end, each.ttl_s))
        for prefix in path:
            self._core.pins.prolong(prefix.pin, self._core.pins.now() + prefix.ttl_s)
        return kept

    def _keep_up_to(self, end: int, ttl_s: float, tenant: str | None, chain: BlockChain, path: list[_Kept]) -> bool:
        """See that the first *end* tokens are kept, and for so long; False if the tenant's share has no room."""
        start = path[-1].end if path else 0
        if start < end:
            until = self._core.pins.now() + ttl_s
            pin = self._shares.pin(tenant, chain, end, until=until, start=start)
            if pin is None:
                return False
            path.append(_Kept(start, end, ttl_s, pin))
            self._kept.setdefault(tenant, {})[chain.names[end // chain.block_size - 1]] = path[-1]
        for prefix in path:
            if prefix.start < end:
                prefix.ttl_s = max(prefix.ttl_s, ttl_s)
        return True

    def _begun_with(self, tenant: str | None, chain: BlockChain) -> list[_Kept]:
        """The tenant's kept prefixes that the prompt begins with, the shortest first, without a gap between them."""
        mine, path = self._kept.get(tenant, {}), list[_Kept]()
        for name in [name for name in chain.names if name in mine]:
            if mine[name].start <= (path[-1].end if path else 0):
                path.append(mine[name])
            else:  # what it continues has just ended, as its own time is over too
                self._core.pins.unpin(mine.pop(name).pin)
        return path

    def _forget_ended(self) -> None:
        has = self._core.pins.has
        left = {
            tenant: {name: kept for name, kept in prefixes.items() if has(kept.pin)}
            for tenant, prefixes in self._kept.items()
        }
        self._kept = {tenant: prefixes for tenant, prefixes in left.items() if prefixes}
