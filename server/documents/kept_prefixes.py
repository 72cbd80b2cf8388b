"""PinnedPrefixes: the prompt prefixes that requests mark with `cache_control`, pinned in host memory for a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.engine.core import EngineCore
from kvtier.engine.llm import keyed
from kvtier.server.documents.pin_shares import PinShares
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, ExtraKeys, MultimodalItem
from kvtier.tiers.pins import Pin


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A position in a prompt that `cache_control` marks.

    The prefix before the position stays pinned for *ttl_s* seconds after each use.
    """

    num_tokens: int  # before the breakpoint
    ttl_s: float


@dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """A prompt, and its breakpoints: the positions that `cache_control` marks, in order.

    *lora* and *cache_salt* are part of the hashes of the prompt's blocks.
    """

    tenant: str | None
    token_ids: Sequence[int]
    lora: str | None
    cache_salt: str | None
    breakpoints: Sequence[Breakpoint]
    items: tuple[MultimodalItem, ...] = ()  # the images in it


@dataclass(frozen=True, slots=True)
class Keeping:
    """The result of `PinnedPrefixes.keep` and `read`: which prefixes of a prompt are pinned."""

    num_before: int = 0  # tokens that were pinned before the call
    breakpoints: Sequence[Breakpoint] = ()  # whose prefixes are pinned now; each is moved back to the end of a block


@dataclass(eq=False, slots=True)
class _Kept:
    start: int  # where the pin begins: the end of a shorter kept prefix, or 0
    end: int  # of the prefix, in tokens
    ttl_s: float
    pin: Pin  # of the tokens from *start* to *end*


class PinnedPrefixes:
    """The pinned prefixes of prompts, within each tenant's share of host memory. Owned by the engine's thread.

    If a prefix extends a pinned one, only the tokens after the shorter prefix are pinned anew. The longer prefix then
    needs the shorter one. So the shorter prefix gets at least the ttl of the longer one, and each use of the longer
    prefix renews both.
    """

    def __init__(self, core: EngineCore, shares: PinShares) -> None:
        self._core = core
        self._shares = shares
        self._kept: dict[str | None, dict[BlockName, _Kept]] = {}  # by tenant and the name of the last block

    def keep(self, prompt: MarkedPrompt) -> Keeping:
        """Pin the cached prefixes of a prompt that end at its breakpoints, and renew those that are pinned already.

        Breakpoints are moved back to the end of a block. A breakpoint is skipped if it lies within the first block, or
        if the tenant's share has no room for its prefix.
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
        """Return which prefixes of a prompt are pinned already, and let their ttl start again."""
        chain = self._chain(prompt)
        path = self._begun_with(prompt.tenant, chain)
        kept = [each for each in self._in_whole_blocks(prompt, chain) if each.num_tokens <= _end_of(path)]
        self._prolong(path, kept)
        return Keeping(_end_of(path), kept)

    def _chain(self, prompt: MarkedPrompt) -> BlockChain:
        extra = ExtraKeys(multimodal=prompt.items)
        return self._core.chain(prompt.token_ids, keyed(self._core, extra, prompt.lora, prompt.cache_salt))

    def _in_whole_blocks(self, prompt: MarkedPrompt, chain: BlockChain) -> Iterator[Breakpoint]:
        for each in prompt.breakpoints:
            if num_tokens := self._core.cache.pins.whole_tokens(chain, each.num_tokens):
                yield Breakpoint(num_tokens, each.ttl_s)

    def _pin(self, breakpoint_: Breakpoint, tenant: str | None, chain: BlockChain, path: list[_Kept]) -> bool:
        """Pin the prefix up to the breakpoint, and append it to *path*, the shorter prefixes that are pinned already.

        Return False if the tenant's share has no room.
        """
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
        """Return the prompt's prefixes that are pinned for the tenant, shortest first."""
        self._forget_ended()
        mine, path = self._kept.get(tenant, {}), list[_Kept]()
        for name in [name for name in chain.names if name in mine]:
            if mine[name].start <= _end_of(path):
                path.append(mine[name])
            else:  # the prefix that this one extends has just ended, so this one ends too
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
    return path[-1].end if path else 0
