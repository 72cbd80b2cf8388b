"""WhatIf: the hit ratio that tiers would have lately, were one of them smaller or larger."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from kvtier.tiers.lower.statistics import TierStatistics, TokenBalance
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.reuse.reuse_distances import Fading, ReuseDistances

SIZES = (0.5, 1.0, 2.0, 4.0)  # of a tier, where 1 is what it has
HALF_LIFE_S = 3600.0
_TIERS = tuple(Tier)
_SIZED = (Tier.DEVICE, Tier.HOST, Tier.DISK)  # how large a remote tier is is others' affair

# By tier: the share of prompt tokens that are found there or in a warmer tier, by the tier's size.
HitRatios: TypeAlias = Mapping[Tier, Mapping[float, float]]


class WhatIf:
    """Told of each prompt's blocks and where its tokens came from. At a tier's own size the hit ratio is what was seen;
    at another it is that and the difference that reuse distances make. Owned by one thread.

    What a tier holds beside that of the warmer ones is what it has room for and what they have no copy of below.
    """

    def __init__(self, clock: Callable[[], float], half_life_s: float = HALF_LIFE_S) -> None:
        self._distances = ReuseDistances(half_life_s, clock)
        self._seen = Fading(len(_TIERS) + 1, half_life_s, clock)  # tokens by tier, then of all prompts

    def on_prompt(self, names: Sequence[BlockName], block_tokens: int, block_bytes: int, tokens: TokenBalance) -> None:
        """Count a prompt whose whole blocks have these *names*, of *block_tokens* and *block_bytes* in all groups. The
        list is kept for a while, and may only grow."""
        self._distances.on_prompt(names, block_tokens, block_bytes)
        self._seen.now()[:] += [*(getattr(tokens, tier) for tier in _TIERS), tokens.num_tokens]

    def on_made(self, names: Sequence[BlockName], block_bytes: int) -> None:
        """Take in blocks that were used, but that nobody asked for."""
        self._distances.on_made(names, block_bytes)

    def hit_ratios(self, tiers: Mapping[Tier, TierStatistics]) -> HitRatios:
        """For each of the tiers and of SIZES; none before the first prompt."""
        seen = self._seen.now()
        num_tokens = float(seen[-1])
        if not num_tokens:
            return {}
        there = [tier for tier in _SIZED if tier in tiers]
        sizes = [_unlike_above(tiers, tier) + _holds(tiers, tier) * size for tier in there for size in SIZES]
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
        """Raise AssertionError if the books disagree."""
        self._distances.check()


def _unlike_above(tiers: Mapping[Tier, TierStatistics], tier: Tier) -> float:
    """Bytes of blocks that warmer tiers have and no colder one has a copy of."""
    above = [tiers[each] for each in _TIERS[: _TIERS.index(tier)] if each in tiers]
    return sum(each.num_dirty * _block_bytes(each) for each in above)


def _holds(tiers: Mapping[Tier, TierStatistics], tier: Tier) -> float:
    """Bytes of the blocks that the tier has room for, as the warmest tier has them: on disk they may be compressed."""
    plain = next((num_bytes for each in _TIERS if each in tiers and (num_bytes := _block_bytes(tiers[each]))), 0.0)
    own = _block_bytes(tiers[tier])
    return tiers[tier].capacity_bytes * (plain / own if own else 1.0)


def _block_bytes(tier: TierStatistics) -> float:
    return tier.num_bytes / tier.num_blocks if tier.num_blocks else 0.0
