"""The facts that explain what an engine would find if it looked up a prompt now."""

import numpy as np

from kvtier.engine.observability.explain.evidence import Evidence
from kvtier.engine.observability.explain.explainer import Explainer
from kvtier.engine.scheduling.trail import Trail
from kvtier.sidecar.layout import Layout
from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.layouts import Layouts
from kvtier.sidecar.lmcache.hybrid_layout import AnyChunkLayout
from kvtier.sidecar.shared_hit import longest_of, misses_behind, needed
from kvtier.tiers.lower.lower_tiers import NOWHERE, ON_DISK, ON_REMOTE
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.tier import Tier

NOT_TOLD = "Only clients of lmcache 0.5.7 report what engines have on their devices, in whole chunks."


def explained_prompt(layouts: Layouts, explainer: Explainer, model: str, chain: BlockChain) -> list[Evidence]:
    """Return the facts that explain which chunks of a prompt are cached, for each layout of the model.

    Layouts whose chunk size differs from the block size of *chain* are left out. Call this function on the thread that
    owns the tiers.
    """
    return [
        _explained(tiers, tiers.layout, explainer, chain)
        for tiers in layouts
        if isinstance(tiers.layout, AnyChunkLayout)
        and (tiers.layout.model, tiers.layout.chunk_tokens) == (model, chain.block_size)
    ]


def namespace_fields(layout: Layout) -> dict[str, str]:
    """Return the fields that distinguish the layout from other layouts."""
    return {name: str(value) for name, value in layout.details().items() if name != "chunk_bytes"}


def _explained(tiers: LayoutTiers, layout: AnyChunkLayout, explainer: Explainer, chain: BlockChain) -> Evidence:
    groups, num_chunks = layout.groups, len(chain.names)
    found = [tiers.tiers.find(group_id, chain.names) for group_id in range(len(groups))]
    num_found = longest_of(groups, [places != NOWHERE for places in found], num_chunks)
    own = [needed(group, num_found) for group in groups]
    where = [
        _coldest([int(places[i]) for places, chunks in zip(found, own, strict=True) if i >= num_found or i in chunks])
        for i in range(num_chunks)
    ]
    num_tokens, size = len(chain.token_ids), chain.block_size
    lasting = [places for places, group in zip(found, groups, strict=True) if not group.forgets]
    num_lasting = min((int(np.argmin(np.append(places != NOWHERE, False))) for places in lasting), default=0)
    missed = misses_behind(num_found, num_lasting, chain.names, tiers)
    misses = tuple((end * size, reason) for end, reason in missed)
    depths = bytes(tier.depth for tier in where[:num_found] if tier is not None)
    trail = Trail(size, chain.names, depths, 0, misses, num_lasting=num_lasting * size)
    namespace = explainer.namespace_of(namespace_fields(tiers.layout))
    return explainer.evidence_now(trail, chain, tiers.ghosts, where, num_tokens, None, namespace)


def _coldest(places: list[int]) -> Tier | None:
    if NOWHERE in places:  # some group's part of the chunk is not cached
        return None
    return Tier.REMOTE if ON_REMOTE in places else Tier.DISK if ON_DISK in places else Tier.HOST
