"""The namespace, the names and the folder under which a rank's pages are stored."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvtier.connectors.sglang_storage.known_sglang import KV_POOL, UnsupportedEngine
from kvtier.connectors.sglang_storage.server_facts import folder_of_model
from kvtier.engine.attached.model_files import weights_digest
from kvtier.tiers.naming.block_hash import BlockName

SCHEME = 2  # version of names and rows; pages of another scheme are not found
_OF_STATES = ("num_mamba_layers", "temporal_dtype", "temporal_state_shape", "conv_dtype", "conv_state_shapes")


def namespace_of(
    config: Any,
    pools: Mapping[str, Mapping[str, object]],
    weights: str,
    is_in_place: bool,
    server: Mapping[str, object],
) -> bytes:
    """Return a 16-byte digest of everything that decides the bytes of pages, apart from SGLang's own hash of a page.

    The pools share one namespace, because each layer's output depends on all earlier layers, whichever pool they use.
    For example, how states are rounded decides the keys and values of later layers.

    Args:
        config: SGLang's `HiCacheStorageConfig`.
        pools: The facts of SGLang's host pools, by name, see `pool_facts`.
        weights: A digest or name of the model's weights.
        is_in_place: Whether SGLang calls `batch_set_v1`, which copies a page's parts from the pool one after the other.
            Otherwise SGLang flattens pages itself and calls `batch_set`, so the order of bytes may be different.
        server: The result of `server_facts`.
    """
    others = {name: facts for name, facts in pools.items() if name != KV_POOL}
    facts = {
        "server": server,
        "scheme": SCHEME,
        "sglang": _version("sglang"),
        "model": config.model_name,
        "weights": weights,
        "tp": [config.tp_rank, config.tp_size],
        "pp": [config.pp_rank, config.pp_size],
        "cp": [config.attn_cp_rank, config.attn_cp_size],
        "dcp": [getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)],
        "mla": config.is_mla_model,
        "heads": [getattr(config, "tp_lcm_size", None), getattr(config, "should_split_heads", False)],
        "rows": "runs" if is_in_place else "flat",
        **pools[KV_POOL],
        **({"pools": others} if others else {}),
    }
    return hashlib.sha256(b"kvtier sglang\0" + json.dumps(facts, sort_keys=True).encode()).digest()[:16]


def pool_facts(pool: Any, runs: Sequence[int]) -> dict[str, object]:
    """Return the layout, types and shapes of the pages of one of SGLang's host pools.

    *runs* has the number of bytes of each contiguous part of a page in memory, see `PageRuns`.
    """
    facts: dict[str, object] = {
        "pool": type(pool).__name__,
        "layout": pool.layout,
        "format": getattr(pool, "storage_format_tag", None),
        "dtype": str(pool.dtype),
        "page_size": pool.page_size,
        "layers": [getattr(pool, name, None) for name in ("layer_num", "start_layer", "end_layer")],
        "shape": [getattr(pool, name, None) for name in ("head_num", "head_dim", "v_head_dim", "kv_cache_dim")],
        "runs": list(runs),
    }
    states = {name: str(getattr(pool, name)) for name in _OF_STATES if hasattr(pool, name)}
    return facts | ({"states": states} if states else {})


def names_of(keys: Sequence[str]) -> list[BlockName]:
    """Return the names of pages on disk, given SGLang's keys. A key is a chained hash of tokens, salt and adapter."""
    return [BlockName(hashlib.sha256(b"kvtier sglang page\0" + key.encode()).digest()) for key in keys]


def folder_of(path: str, config: Any) -> Path:
    """Return the folder below *path* for this rank's store. Each rank is a process and needs its own store."""
    ranks = {"dp": (getattr(config, "dp_rank", 0), None), "tp": (config.tp_rank, config.tp_size)}
    ranks |= {"pp": (config.pp_rank, config.pp_size), "cp": (config.attn_cp_rank, config.attn_cp_size)}
    parts = [f"{name}{rank}" if size is None else f"{name}{rank}of{size}" for name, (rank, size) in ranks.items()]
    return Path(path) / "-".join(parts)


def weights_of(model: str, revision: str | None) -> str:
    """Return the digest of the weights of *model*, a path or a hub id. Raise `UnsupportedEngine` on failure."""
    try:
        return weights_digest(folder_of_model(model, revision))
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedEngine(
            f"cannot determine which weights {model} has ({error}); "
            'set "weights" in hicache-storage-backend-extra-config, for example to a revision'
        ) from None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
