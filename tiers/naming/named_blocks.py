"""NamedBlocks: block names with the parents and the tenant that a tier needs to store the blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.tiers.naming.block_hash import BlockChain, BlockName
from kvtier.tiers.naming.groups import AttentionGroup, BlockGroup
from kvtier.tiers.naming.tenant import NO_TENANT, Origin, tenant_of

BlockIds = npt.NDArray[np.int64]  # of one chain and group, ascending


@dataclass(frozen=True, slots=True)
class NamedBlocks:
    """Blocks of one tenant. *parents* holds the block that each block continues; None if it is useful without it."""

    names: Sequence[BlockName]
    parents: Sequence[BlockName | None]
    tenant: bytes = NO_TENANT

    def since(self, start: int) -> "NamedBlocks":
        """Return the blocks from index *start* on."""
        return NamedBlocks(self.names[start:], self.parents[start:], self.tenant)

    def of(self, group: BlockGroup, places: range) -> "NamedBlocks":
        """Return the blocks at *places* for use in *group*: without parents if the group forgets."""
        names = self.names[places.start : places.stop]
        parents = [None] * len(names) if group.forgets else self.parents[places.start : places.stop]
        return NamedBlocks(names, parents, self.tenant)

    def origin(self, place: int) -> Origin:
        """Return the parent and the tenant of the block at index *place*."""
        return Origin(self.parents[place], self.tenant)


def names_of(chain: BlockChain, group: AttentionGroup, ids: BlockIds) -> Sequence[BlockName]:
    """Return the names of the chain's blocks *ids*."""
    if _are_in_a_row(ids):
        return chain.names_of(group.block_size, range(int(ids[0]), int(ids[-1]) + 1))
    step = group.block_size // chain.block_size
    return [chain.names[(i + 1) * step - 1] for i in ids.tolist()]


def blocks_of(chain: BlockChain, group: AttentionGroup, ids: BlockIds) -> NamedBlocks:
    """Return the chain's blocks *ids*, without parents if *group* forgets, because it needs only its window."""
    names, parents = names_of(chain, group, ids), _parents(chain, group, ids)
    return NamedBlocks(names, parents, tenant_of(chain.extra.cache_salt))


def _parents(chain: BlockChain, group: AttentionGroup, ids: BlockIds) -> Sequence[BlockName | None]:
    if group.forgets:
        return [None] * len(ids)
    if _are_in_a_row(ids):
        first, last = int(ids[0]), int(ids[-1])
        before = chain.names_of(group.block_size, range(max(0, first - 1), last))
        return before if first else [None, *before]
    step = group.block_size // chain.block_size
    return [chain.names[i * step - 1] if i else None for i in ids.tolist()]


def _are_in_a_row(ids: BlockIds) -> bool:
    return len(ids) > 0 and int(ids[-1]) - int(ids[0]) == len(ids) - 1
