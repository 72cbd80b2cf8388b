"""Which vLLM its offloading on kvtier knows: the one place where that is said."""

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from inspect import signature
from typing import Any

from kvtier.connectors.vllm_connector.engine_layout import NotServed
from kvtier.connectors.vllm_connector.known_vllm import CRYPTOGRAPHIC

TESTED = ("0.32",)  # with the real engine: tests/connectors/test_vllm_offloading.py
OF_REGION = ("engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size")
OF_SPEC = ("num_chunks", "kv_bytes_per_chunk", "cpu_page_size_per_worker", "replicated_layout", "blocks_per_chunk")
OF_TIER = ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector")
OF_ONE_PROCESS = {  # of vLLM's `OffloadingConfig` and its parts: what differs where the bytes are the same
    *("engine_id", "extra_config", "enable_kv_cache_events", "rank", "data_parallel_index", "data_parallel_size"),
    "data_parallel_rank_local",
}


def check_cpu_spec(spec: Any, region: type, platform: str) -> None:
    """Raise `NotServed` for a vLLM that lacks what copies on CPUs rest on, and for what they do not serve. *spec*:
    vLLM's `TieringOffloadingSpec`; *region*: its class of the host pool's memory."""
    if platform != "cpu":
        raise NotServed(
            f"vLLM copies its KV cache on {platform} itself; "
            'use "spec_name":"TieringOffloadingSpec" without "spec_module_path"'
        )
    missing = [name for name in OF_REGION if name not in signature(region).parameters]
    missing += [name for name in OF_SPEC if not hasattr(spec, name)]
    if missing:
        raise NotServed(
            f"the offloading of this vLLM has no {', '.join(missing)}, on which kvtier's copies rest; "
            f"tested are {', '.join(TESTED)}"
        )
    if spec.config.canonical_layout:
        raise NotServed("copies on CPUs do not serve canonical_layout; leave it out of kv_connector_extra_config")
    if not spec.num_chunks:
        raise NotServed("cpu_bytes_to_use has no room for one chunk; raise it")


def check_tier(base: type, vllm_config: Any) -> None:
    """Raise `NotServed` for a vLLM that lacks what the tier rests on, and for configurations in which a block's key
    does not stand for its bytes. *base*: vLLM's class of secondary tiers."""
    missing = [name for name in OF_TIER if name not in signature(base).parameters]
    if missing:
        raise NotServed(
            f"the secondary tiers of this vLLM have no {', '.join(missing)}, on which KVTier rests; "
            f"tested are {', '.join(TESTED)}"
        )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in CRYPTOGRAPHIC:
        raise NotServed(
            f"--prefix-caching-hash-algo {algorithm}: two prompts of equal hashes would have each other's blocks; "
            f"use {' or '.join(CRYPTOGRAPHIC)}"
        )
    if vllm_config.lora_config is not None:
        raise NotServed(
            "vLLM tells a tier nothing of adapters' weights, so two of one name would have each other's blocks; "
            "use KVTierConnector, which knows them, or leave --enable-lora out"
        )
    if vllm_config.speculative_config is not None:
        raise NotServed("KVTier does not serve speculative decoding, whose draft has weights of its own")


def connector_configs() -> tuple[Any, Any]:
    """vLLM's configuration and its `KVCacheConfig`, of the connector that is making a tier on this thread.

    A tier is told less than what decides the bytes of its blocks: neither quantization nor overrides of the model's
    configuration, nor whether there are adapters. They are known where the tier is made, some calls above, and given
    to it by no call; so they are taken from there. `NotServed` if they are not there.
    """
    frame = inspect.currentframe()
    while frame is not None:
        found = [frame.f_locals.get(name) for name in ("vllm_config", "kv_cache_config")]
        if all(found):
            return found[0], found[1]
        frame = frame.f_back
    raise NotServed(
        "this vLLM makes secondary tiers where its configuration is not known, on which KVTier rests; "
        f"tested are {', '.join(TESTED)}"
    )


def pool_facts(config: Any) -> dict[str, object]:
    """What decides the bytes of a row of the host pool beside the engine: how ranks and groups share it. *config*:
    vLLM's `OffloadingConfig`."""
    return _kept(asdict(config))


def end_tokens(req_context: Any) -> Mapping[bytes, int]:
    """The keys that vLLM has made for the request, and at which token each one's block ends; none if it does not
    say. Without them blocks have no parent, and leave the disk in the order in which they came."""
    known = getattr(req_context, "_offload_key_positions", {})
    return known if isinstance(known, Mapping) else {}


def _kept(fields: Mapping[str, Any]) -> dict[str, object]:
    return {
        name: _kept(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
        if name not in OF_ONE_PROCESS
    }
