"""Blocks in host memory that are not what was stored."""

from kvtier.engine.core import EngineCore
from kvtier.tiers.naming.block_hash import BlockName


def damage_in_host(core: EngineCore, name: BlockName) -> None:
    """Flip a bit of the block, which is in host memory."""
    host = core.cache.lower.index.host
    assert host is not None, "an engine without host memory"
    (slot,) = host[0].pool.find_all([name]).tolist()
    core.cache.residency.groups[0].memory.host_block(slot)[3] ^= 1
