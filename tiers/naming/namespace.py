"""Namespace: what determines KV bytes besides the prompt. Blocks of another namespace are never hits."""

import hashlib
import json
from dataclasses import asdict, dataclass

LAYOUT_VERSION = 2  # version of the block layout: for each layer, each of its parts as [block_size, heads, width]


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """Geometry of one attention group, whose layers share one kind of attention. *kind* identifies this kind.

    *parts* are what a layer keeps of a token, as (heads, width): keys and values, or one latent row.
    """

    kind: str
    layer_ids: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """Geometry of the group of a model's recurrent and convolution states. *kind* identifies the group's kind.

    *tensors* are the states of one request in the order in which a slot holds them, each as (layer id, "recurrent" or
    "convolution", index among the layer's states of this kind, shape, dtype).
    """

    kind: str
    tensors: tuple[tuple[int, str, int, tuple[int, ...], str], ...]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Identity of a model's KV cache. Every key on disk begins with its `digest`."""

    model: str
    config_digest: str  # of settings that are not in the weights, such as rotary embedding, norms and activations
    weights_digest: str
    dtype: str
    geometry: tuple[GroupGeometry | StateGeometry, ...]
    block_size: int
    hash_algorithm: str
    hash_seed: str
    kv_quantization: str = "none"  # "fp8" if any tier rounds blocks, because rounded blocks then spread to all tiers
    encryption_key_id: str = ""  # key that encrypts the records on disk; empty if they are not encrypted
    shard_rank: int = 0
    num_shards: int = 1
    layout_version: int = LAYOUT_VERSION

    @property
    def digest(self) -> bytes:
        """Digest of all fields, 16 bytes."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).digest()[:16]
