"""Digests of a model: of its configuration and of its weights."""

import hashlib
import json

import torch
from transformers import PreTrainedConfig

from kvtier.engine.tensor_digest import tensor_digest

LOADING = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version"})  # say nothing about the KV


def config_digest(config: PreTrainedConfig) -> str:
    """Digest of a model's configuration, all but its name and what only says how it is loaded."""
    fields = {key: value for key, value in config.to_dict().items() if key not in LOADING and key[0] != "_"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(model: torch.nn.Module) -> str:
    """Digest of names, shapes, types and bytes of all parameters and buffers, those included that no file holds.

    xxh3_128 of each tensor, sha256 over the list.
    """
    total = hashlib.sha256()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode() + tensor_digest(tensor))
    return total.hexdigest()
