"""The vLLM versions and configurations that kvtier's offloading supports."""

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from inspect import signature
from operator import attrgetter
from typing import Any

from kvtier.connectors.vllm_connector.engine_layout import UnsupportedEngine
from kvtier.connectors.vllm_connector.known_vllm import CRYPTOGRAPHIC
from kvtier.connectors.vllm_offloading.pool_room import HostPool

TESTED = ("0.32",)  # with the real engine: tests/connectors/test_vllm_offloading.py
OF_REGION = ("engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size")
OF_SPEC = ("num_chunks", "kv_bytes_per_chunk", "cpu_page_size_per_worker", "replicated_layout", "blocks_per_chunk")
OF_TIER = ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector")
OF_POOL = ("_get_num_free_chunks", "_num_evictable_cache_chunks", "touch")  # a method, a number, and a method
OF_ONE_PROCESS = {  # fields of vLLM's `OffloadingConfig` and its parts that do not decide a block's bytes
    *("engine_id", "extra_config", "enable_kv_cache_events", "rank", "data_parallel_index", "data_parallel_size"),
    "data_parallel_rank_local",
}


def check_cpu_spec(spec: Any, region: type, platform: str) -> None:
    """Raise `UnsupportedEngine` if `CpuTieringOffloadingSpec` does not support this vLLM or its configuration.

    *spec* is vLLM's `TieringOffloadingSpec`. *region* is vLLM's class for the memory of the host pool. *platform* is
    vLLM's device type, such as "cpu".
    """
    if platform != "cpu":
        raise UnsupportedEngine(
            f"CpuTieringOffloadingSpec works only for vLLM on a CPU, but vLLM runs on {platform}; "
            'use "spec_name":"TieringOffloadingSpec" without "spec_module_path"'
        )
    missing = [name for name in OF_REGION if name not in signature(region).parameters]
    missing += [name for name in OF_SPEC if not hasattr(spec, name)]
    if missing:
        raise UnsupportedEngine(
            f"kvtier does not support this version of vLLM: its offloading has no {', '.join(missing)}; "
            f"use one of the tested versions: {', '.join(TESTED)}"
        )
    if spec.config.canonical_layout:
        raise UnsupportedEngine("canonical_layout is not supported on CPUs; leave it out of kv_connector_extra_config")
    if not spec.num_chunks:
        raise UnsupportedEngine("cpu_bytes_to_use is too small for one chunk; raise it")


def check_tier(base: type, vllm_config: Any) -> None:
    """Raise `UnsupportedEngine` if `KVTier` does not support this vLLM or its configuration.

    *base* is vLLM's base class of secondary tiers. A configuration is unsupported if two blocks with the same key may
    have different bytes.
    """
    missing = [name for name in OF_TIER if name not in signature(base).parameters]
    if missing:
        raise UnsupportedEngine(
            f"KVTier does not support this version of vLLM: its secondary tiers have no {', '.join(missing)}; "
            f"use one of the tested versions: {', '.join(TESTED)}"
        )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in CRYPTOGRAPHIC:
        raise UnsupportedEngine(
            f"--prefix-caching-hash-algo {algorithm} is not a cryptographic hash, so a prompt could get blocks of "
            f"another prompt; use {' or '.join(CRYPTOGRAPHIC)}"
        )
    if vllm_config.lora_config is not None:
        raise UnsupportedEngine(
            "KVTier does not support LoRA: it cannot tell apart two adapters with the same name, because vLLM does not "
            "pass their weights to a tier; use KVTierConnector, or start vLLM without --enable-lora"
        )
    if vllm_config.speculative_config is not None:
        raise UnsupportedEngine(
            "KVTier does not support speculative decoding, because it cannot tell which weights the draft model has; "
            "start vLLM without --speculative-config"
        )


def connector_configs() -> tuple[Any, Any]:
    """Return the `VllmConfig` and `KVCacheConfig` of the engine that is creating a tier on this thread.

    vLLM does not pass to a tier all settings that determine the bytes of a block: for example, quantization, overrides
    of the model's configuration and the use of LoRA adapters are missing. A function further up the call stack has
    both objects as local variables, so they are read from there.

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
        "KVTier cannot find the configuration of this version of vLLM; "
        f"use one of the tested versions: {', '.join(TESTED)}"
    )


def pool_facts(config: Any) -> dict[str, object]:
    """Return the settings that determine how ranks and groups share a row (one chunk) of the host pool.

    Together with `engine_facts`, these settings determine the bytes of a row. *config* is vLLM's `OffloadingConfig`.
    """
    return _kept(asdict(config))


def end_tokens(req_context: Any) -> Mapping[bytes, int]:
    """Return for each block of the request, by vLLM's key, the token position at which the block ends.

    The result is empty if vLLM does not provide these positions. The blocks are then stored without parents, and
    evicted in the order in which they were stored.
    """
    known = getattr(req_context, "_offload_key_positions", {})
    return known if isinstance(known, Mapping) else {}


def host_pool(parent: Any, req_context: Any) -> HostPool | None:
    """Return what can be seen and done of vLLM's host pool, or None if this vLLM does not show its pool.

    *parent* is the object that vLLM passes to a tier in each step. *req_context* is passed to `touch`.
    """
    pool = getattr(getattr(parent, "_m", None), "primary_tier", None)
    if not all(hasattr(pool, name) for name in OF_POOL):
        return None
    num_free, num_evictable, touch = (attrgetter(name) for name in OF_POOL)
    return HostPool(
        lambda: int(num_free(pool)() + num_evictable(pool)),
        lambda keys: touch(pool)(keys, req_context),
    )


def _kept(fields: Mapping[str, Any]) -> dict[str, object]:
    return {
        name: _kept(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
        if name not in OF_ONE_PROCESS
    }
