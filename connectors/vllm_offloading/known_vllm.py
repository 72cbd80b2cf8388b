"""The vLLM versions and configurations that kvtier's offloading supports."""

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from inspect import signature
from typing import Any

from kvtier.connectors.vllm_connector.engine_layout import UnsupportedEngine
from kvtier.connectors.vllm_connector.known_vllm import CRYPTOGRAPHIC

TESTED = ("0.32",)  # with the real engine: tests/connectors/test_vllm_offloading.py
OF_REGION = ("engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size")
OF_SPEC = ("num_chunks", "kv_bytes_per_chunk", "cpu_page_size_per_worker", "replicated_layout", "blocks_per_chunk")
OF_TIER = ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector")
OF_ONE_PROCESS = {  # fields of vLLM's `OffloadingConfig` and its parts that do not decide a block's bytes
    *("engine_id", "extra_config", "enable_kv_cache_events", "rank", "data_parallel_index", "data_parallel_size"),
    "data_parallel_rank_local",
}


def check_cpu_spec(spec: Any, region: type, platform: str) -> None:
    """Raise `UnsupportedEngine` if copies on CPUs do not support this vLLM or its configuration.

    *spec* is vLLM's `TieringOffloadingSpec`, *region* its class of the host pool's memory.
    """
    if platform != "cpu":
        raise UnsupportedEngine(
            f"vLLM copies its KV cache on {platform} itself; "
            'use "spec_name":"TieringOffloadingSpec" without "spec_module_path"'
        )
    missing = [name for name in OF_REGION if name not in signature(region).parameters]
    missing += [name for name in OF_SPEC if not hasattr(spec, name)]
    if missing:
        raise UnsupportedEngine(
            f"the offloading of this vLLM has no {', '.join(missing)}, which kvtier's copies need; "
            f"tested versions: {', '.join(TESTED)}"
        )
    if spec.config.canonical_layout:
        raise UnsupportedEngine(
            "copies on CPUs do not serve canonical_layout; leave it out of kv_connector_extra_config"
        )
    if not spec.num_chunks:
        raise UnsupportedEngine("cpu_bytes_to_use has no room for one chunk; raise it")


def check_tier(base: type, vllm_config: Any) -> None:
    """Raise `UnsupportedEngine` if the tier does not support this vLLM or its configuration.

    *base* is vLLM's base class of secondary tiers. Configurations in which a block's key does not determine the block's
    bytes are not supported.
    """
    missing = [name for name in OF_TIER if name not in signature(base).parameters]
    if missing:
        raise UnsupportedEngine(
            f"the secondary tiers of this vLLM have no {', '.join(missing)}, which KVTier needs; "
            f"tested versions: {', '.join(TESTED)}"
        )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in CRYPTOGRAPHIC:
        raise UnsupportedEngine(
            f"--prefix-caching-hash-algo {algorithm}: two prompts with equal hashes would get each other's blocks; "
            f"use {' or '.join(CRYPTOGRAPHIC)}"
        )
    if vllm_config.lora_config is not None:
        raise UnsupportedEngine(
            "vLLM does not pass LoRA adapters' weights to a tier, so two adapters with one name would get each other's "
            "blocks; use KVTierConnector, which knows the weights, or leave --enable-lora out"
        )
    if vllm_config.speculative_config is not None:
        raise UnsupportedEngine(
            "KVTier does not serve speculative decoding, because a draft model has weights of its own; start vLLM "
            "without --speculative-config"
        )


def connector_configs() -> tuple[Any, Any]:
    """Return the `VllmConfig` and `KVCacheConfig` of the engine that is creating a tier on this thread.

    vLLM does not pass a tier everything that decides the bytes of its blocks, such as quantization, overrides of the
    model's configuration, and whether there are adapters. But a function further up the call stack has these two
    objects, so they are read from that function's local variables.

    Raises:
        UnsupportedEngine: If no function on the call stack has both objects.
    """
    frame = inspect.currentframe()
    while frame is not None:
        found = [frame.f_locals.get(name) for name in ("vllm_config", "kv_cache_config")]
        if all(found):
            return found[0], found[1]
        frame = frame.f_back
    raise UnsupportedEngine(
        "this vLLM creates secondary tiers in a place where KVTier cannot read vLLM's configuration; "
        f"tested versions: {', '.join(TESTED)}"
    )


def pool_facts(config: Any) -> dict[str, object]:
    """Return the facts about how ranks and groups share a row of the host pool.

    They decide the bytes of a row, in addition to `engine_facts`. *config* is vLLM's `OffloadingConfig`.
    """
    return _kept(asdict(config))


def end_tokens(req_context: Any) -> Mapping[bytes, int]:
    """Return the token at which each of the request's blocks ends, by vLLM's key of the block.

    The result is empty if vLLM does not provide these positions. The request's blocks then have no parents on disk, so
    they are evicted in the order in which they were stored.
    """
    known = getattr(req_context, "_offload_key_positions", {})
    return known if isinstance(known, Mapping) else {}


def _kept(fields: Mapping[str, Any]) -> dict[str, object]:
    return {
        name: _kept(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
        if name not in OF_ONE_PROCESS
    }
