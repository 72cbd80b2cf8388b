"""KeptPrefixes: beginnings of prompts that stay in host memory until they have not been read for a while."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.engine.core import EngineCore
from kvtier.engine.llm import keyed
from kvtier.server.documents.pin_shares import PinShares
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, BlockChain, BlockName
from kvtier.tiers.pins import Pin


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A place in a prompt: what comes before it is to be kept until it has not been read for *ttl_s* seconds."""

    num_tokens: int  # before the breakpoint
    ttl_s: float


@dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """A prompt with breakpoints, in their order, and what its blocks are named with."""

    tenant: str | None
    token_ids: Sequence[int]
    lora: str | None
    cache_salt: str | None
    breakpoints: Sequence[Breakpoint]


@dataclass(frozen=True, slots=True)
class Keeping:
    """What of a prompt is kept."""

    num_before: int = 0  # tokens that were kept already
    breakpoints: Sequence[Breakpoint] = ()  # up to which it is kept now, in whole blocks


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

    def keep(self, prompt: MarkedPrompt) -> Keeping:
        """Keep what is cached of a prompt up to its breakpoints.

        These are moved back to the end of a block. The tenant's prefixes that the prompt begins with count as read. A
        breakpoint within the first block is left out, and so is one for which the tenant's share has no room.
        """
        chain = self._chain(prompt)
        path = self._begun_with(prompt.tenant, chain)
        num_before, kept = _end_of(path), []
        for each in self._in_whole_blocks(prompt, chain):
            if each.num_tokens <= _end_of(path) or self._pin(each, prompt.tenant, chain, path):
                kept.append(each)
        self._prolong(path, kept)
        return Keeping(num_before, kept)

    def read(self, prompt: MarkedPrompt) -> Keeping:
        """What of a prompt is kept already, which counts as read."""
        chain = self._chain(prompt)
        path = self._begun_with(prompt.tenant, chain)
        kept = [each for each in self._in_whole_blocks(prompt, chain) if each.num_tokens <= _end_of(path)]
        self._prolong(path, kept)
        return Keeping(_end_of(path), kept)

    def _chain(self, prompt: MarkedPrompt) -> BlockChain:
        return self._core.chain(prompt.token_ids, keyed(self._core, NO_EXTRA_KEYS, prompt.lora, prompt.cache_salt))

    def _in_whole_blocks(self, prompt: MarkedPrompt, chain: BlockChain) -> Iterator[Breakpoint]:
        for each in prompt.breakpoints:
            if num_tokens := self._core.cache.whole_tokens(chain, each.num_tokens):
                yield Breakpoint(num_tokens, each.ttl_s)

    def _pin(self, breakpoint_: Breakpoint, tenant: str | None, chain: BlockChain, path: list[_Kept]) -> bool:
        """Pin what is not kept before the breakpoint, as the new end of *path*; False if the share has no room."""
        start, end, ttl_s = _end_of(path), breakpoint_.num_tokens, breakpoint_.ttl_s
        pin = self._shares.pin(tenant, chain, end, until=self._core.pins.now() + ttl_s, start=start)
        if pin is None:
            return False
        path.append(_Kept(start, end, ttl_s, pin))
        self._kept.setdefault(tenant, {})[chain.names[end // chain.block_size - 1]] = path[-1]
        return True

    def _prolong(self, path: Sequence[_Kept], kept: Sequence[Breakpoint]) -> None:
        for prefix in path:
            prefix.ttl_s = max([prefix.ttl_s, *(each.ttl_s for each in kept if prefix.start < each.num_tokens)])
            self._core.pins.prolong(prefix.pin, self._core.pins.now() + prefix.ttl_s)

    def _begun_with(self, tenant: str | None, chain: BlockChain) -> list[_Kept]:
        """The tenant's kept prefixes that the prompt begins with, the shortest first, without a gap between them."""
        self._forget_ended()
        mine, path = self._kept.get(tenant, {}), list[_Kept]()
        for name in [name for name in chain.names if name in mine]:
            if mine[name].start <= _end_of(path):
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


def _end_of(path: Sequence[_Kept]) -> int:
    """Tokens up to which a prompt is kept by prefixes that it begins with."""
    return path[-1].end if path else 0
