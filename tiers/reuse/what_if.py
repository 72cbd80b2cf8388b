"""WhatIf: the recent hit ratio that the tiers would have if one of them were smaller or larger."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from kvtier.tiers.lower.statistics import TierStatistics, TokenBalance
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.reuse.reuse_distances import Fading, ReuseDistances

SIZES = (0.5, 1.0, 2.0, 4.0)  # multiples of a tier's present size
HALF_LIFE_S = 3600.0
_TIERS = tuple(Tier)
_SIZED = (Tier.DEVICE, Tier.HOST, Tier.DISK)  # the size of the remote tier is not ours to choose

# For each tier and each multiple of its size: the share of prompt tokens found in this tier or a warmer one.
HitRatios: TypeAlias = Mapping[Tier, Mapping[float, float]]


class WhatIf:
    """An estimate of the hit ratios that the tiers would have at other sizes.

    At its present size, a tier has the observed hit ratio. For another size, the estimate is the observed hit ratio
    plus the change that follows from the reuse distances (`ReuseDistances`). The computation treats a tier and all
    warmer tiers as one LRU cache. The size of this cache is the tier's capacity, plus the bytes of blocks that are only
    in warmer tiers. Owned by one thread.
    """

    def __init__(
        self, clock: Callable[[], float], half_life_s: float = HALF_LIFE_S, *, state_bytes: int | None = None
    ) -> None:
        """Create an estimate without prompts.

        *state_bytes* is the size of a recurrent state. States are much larger than blocks of keys and values, and each
        tier has another share of them. If the size is None, all blocks of a tier count as equally large.
        """
        self._state_bytes = state_bytes
        self._distances = ReuseDistances(half_life_s, clock)
        self._seen = Fading(len(_TIERS) + 1, half_life_s, clock)  # tokens by tier, then the total of all prompts

    def on_prompt(self, names: Sequence[BlockName], block_tokens: int, block_bytes: int, tokens: TokenBalance) -> None:
        """Count a prompt whose full blocks have these *names*.

        Args:
            names: Read later too, so the caller may only append to this list.
            block_tokens: Number of tokens in a block.
            block_bytes: Size of a block in all attention groups together.
            tokens: How many of the prompt's tokens came from each tier.
        """
        self._distances.on_prompt(names, block_tokens, block_bytes)
        self._seen.now()[:] += [*(getattr(tokens, tier) for tier in _TIERS), tokens.num_tokens]

    def on_generated(self, names: Sequence[BlockName], block_bytes: int) -> None:
        """Record blocks of generated tokens. They take space in a cache, but count neither as hits nor as misses."""
        self._distances.on_generated(names, block_bytes)

    def hit_ratios(self, tiers: Mapping[Tier, TierStatistics]) -> HitRatios:
        """Return the hit ratio of each tier at each multiple of its size in `SIZES`; empty before the first prompt."""
        seen = self._seen.now()
        num_tokens = float(seen[-1])
        if not num_tokens:
            return {}
        there = [tier for tier in _SIZED if tier in tiers]
        sizes = [_unlike_above(tiers, tier) + self._holds(tiers, tier) * size for tier in there for size in SIZES]
        within = self._distances.tokens_within(sizes).reshape(len(there), len(SIZES))
        ratios: dict[Tier, Mapping[float, float]] = {}
        for tier, row in zip(there, within, strict=True):
            here = float(seen[: _TIERS.index(tier) + 1].sum())
            changes = row - row[SIZES.index(1.0)]
            ratios[tier] = {
                size: min(1.0, max(0.0, (here + float(change)) / num_tokens))
                for size, change in zip(SIZES, changes, strict=True)
            }
        return ratios

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self._distances.check()

    def _holds(self, tiers: Mapping[Tier, TierStatistics], tier: Tier) -> float:
        """Return how many bytes of uncompressed blocks fit into the tier. On disk, blocks may be compressed."""
        own = tiers[tier]
        if not own.num_bytes:
            return float(own.capacity_bytes)
        num_states, num_others = self._states_and_others(own)
        plain_bytes = num_states * (self._state_bytes or 0) + num_others * self._plain_block_bytes(tiers)
        return own.capacity_bytes * plain_bytes / own.num_bytes

    def _plain_block_bytes(self, tiers: Mapping[Tier, TierStatistics]) -> float:
        """Return the mean size of uncompressed blocks that are no states: those of the warmest tier that has any."""
        for each in _TIERS:
            if each in tiers and tiers[each].num_bytes:
                num_states, num_others = self._states_and_others(tiers[each])
                if num_others:
                    return (tiers[each].num_bytes - num_states * (self._state_bytes or 0)) / num_others
        return 0.0

    def _states_and_others(self, tier: TierStatistics) -> tuple[int, int]:
        """Return the numbers of the tier's states and other blocks. Without a size of states, all count as others."""
        num_states = 0 if self._state_bytes is None else tier.num_states
        return num_states, tier.num_blocks - num_states


def _unlike_above(tiers: Mapping[Tier, TierStatistics], tier: Tier) -> float:
    """Return the bytes of the blocks that are only in tiers warmer than *tier*."""
    above = [tiers[each] for each in _TIERS[: _TIERS.index(tier)] if each in tiers]
    return sum(each.num_dirty * _block_bytes(each) for each in above)


def _block_bytes(tier: TierStatistics) -> float:
    return tier.num_bytes / tier.num_blocks if tier.num_blocks else 0.0
