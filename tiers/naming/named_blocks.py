"""Tenants of blocks, and `NamedBlocks`: what a tier needs to know of blocks in order to store them.

A tier needs the name, the tenant and the parent of each block. The parent is the block before it in the prompt.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.store.blob_store import TENANT_BYTES
from kvtier.tiers.naming.block_hash import BlockChain, BlockName
from kvtier.tiers.naming.groups import AttentionGroup, BlockGroup

BlockIds = npt.NDArray[np.int64]  # indices of blocks of one chain and attention group, ascending
NO_TENANT = b""  # the tenant of requests without a salt
OwnerNumbers = npt.NDArray[np.uint64]  # tenants as numbers, 0 for NO_TENANT


def tenant_of(cache_salt: str | None) -> bytes:
    """Return the tenant of requests with *cache_salt*, or NO_TENANT if there is no salt.

    The tenant is an 8-byte hash that does not reveal the salt. Only the part of the salt before the first NUL counts,
    so a tenant can use several salts.
    """
    if not cache_salt:
        return NO_TENANT
    return hashlib.sha256(b"kvtier tenant\0" + cache_salt.partition("\0")[0].encode()).digest()[:TENANT_BYTES]


def number_of(tenant: bytes) -> int:
    """Return the 8 bytes of *tenant* as a number; 0 for NO_TENANT."""
    return int.from_bytes(tenant, "little")


def tenant_with(number: int) -> bytes:
    """Return the tenant whose `number_of` is *number*."""
    return number.to_bytes(TENANT_BYTES, "little") if number else NO_TENANT


class Origin(NamedTuple):
    """The parent and the tenant of a block.

    *parent* is the name of the previous block in the prompt, if the block is useless without it. Then the parent must
    stay on disk as long as the block. *parent* is None for other blocks, such as the first block of a prompt.
    """

    parent: BlockName | None = None
    tenant: bytes = NO_TENANT


@dataclass(frozen=True, slots=True)
class NamedBlocks:
    """Names of blocks of one tenant, and the names of their parents.

    The parent of a block is the previous block in the prompt. It is None for the first block of a prompt, and for
    blocks of layers with sliding windows or chunks, which can be used without the previous block.
    """

    names: Sequence[BlockName]
    parents: Sequence[BlockName | None]
    tenant: bytes = NO_TENANT

    def since(self, start: int) -> "NamedBlocks":
        """Return the blocks from index *start* on."""
        return NamedBlocks(self.names[start:], self.parents[start:], self.tenant)

    def of(self, group: BlockGroup, places: range) -> "NamedBlocks":
        """Return the blocks at the indices *places*.

        Their parents (the previous blocks) are None if *group* can use a block without its parent.
        """
        names = self.names[places.start : places.stop]
        parents = [None] * len(names) if group.forgets else self.parents[places.start : places.stop]
        return NamedBlocks(names, parents, self.tenant)


def names_of(chain: BlockChain, group: AttentionGroup, ids: BlockIds) -> Sequence[BlockName]:
    """Return the names of a group's blocks in a prompt. *ids* are the indices of the blocks."""
    if len(ids) and int(ids[-1]) - int(ids[0]) == len(ids) - 1:  # consecutive
        return chain.names_of(group.block_size, range(int(ids[0]), int(ids[-1]) + 1))
    step = group.block_size // chain.block_size
    return [chain.names[(i + 1) * step - 1] for i in ids.tolist()]


def blocks_of(chain: BlockChain, group: AttentionGroup, ids: BlockIds) -> NamedBlocks:
    """Return a group's blocks in a prompt. *ids* are the indices of the blocks.

    The blocks have no parents if tokens of *group* read only recent blocks.
    """
    parents: Sequence[BlockName | None] = [None] * len(ids)
    if not group.forgets:
        before = ids[ids > 0] - 1
        parents = [*parents[len(before) :], *names_of(chain, group, before)]
    return NamedBlocks(names_of(chain, group, ids), parents, tenant_of(chain.extra.cache_salt))
