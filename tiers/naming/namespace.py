"""Namespace: everything beside the prompt that decides KV bytes. A block of another namespace is never a hit."""

import hashlib
import json
from dataclasses import asdict, dataclass

LAYOUT_VERSION = 1  # of the bytes of a block: [group_layers, 2, block_size, num_kv_heads, head_dim]


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One attention group's share of a block; *kind* is the group's class name with its window."""

    kind: str
    layer_ids: tuple[int, ...]
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Namespace:
    """Identity of a model's KV cache. `digest` goes in front of every key on disk."""

    model: str
    config_digest: str  # the settings that no weight holds: rotary embedding, norms, activations …
    weights_digest: str
    dtype: str
    geometry: tuple[GroupGeometry, ...]
    block_size: int
    hash_algorithm: str
    hash_seed: str
    kv_quantization: str = "none"  # "fp8": a tier of this engine rounds blocks, so a block of any tier may be rounded
    encryption_key_id: str = ""  # of the disk's records
    shard_rank: int = 0
    num_shards: int = 1
    layout_version: int = LAYOUT_VERSION

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal only for equal fields."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).digest()[:16]
