"""The key of a block in a store."""

from kvtier.tiers.lower.name_set import NAME_BYTES
from kvtier.tiers.naming.block_hash import BlockName

NAMESPACE_BYTES = 16
GROUP_BYTES = 4
KEY_BYTES = NAMESPACE_BYTES + NAME_BYTES + GROUP_BYTES


def block_key(namespace: bytes, group_id: int, name: BlockName) -> bytes:
    """Namespace (16 B) ‖ block name ‖ group id (4 B, big endian)."""
    return namespace + name + group_id.to_bytes(GROUP_BYTES, "big")
