"""The vLLM versions and configurations that the connector supports."""

from typing import Any

from kvtier.connectors.vllm_connector.drafters import check_drafter
from kvtier.connectors.vllm_connector.engine_layout import UnsupportedEngine

TESTED = ("0.32",)  # with the real engine: tests/connectors/test_vllm_connector.py
HOOKS = (
    "build_connector_worker_meta",
    "get_external_cache_hit_sources",
    "get_transfer_results",
    "handle_preemptions",
    "update_connector_output",
)
CRYPTOGRAPHIC = ("sha256", "sha256_cbor")


def check_engine(base: type, vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise `UnsupportedEngine` if the connector does not support this vLLM or its configuration.

    *base* is vLLM's base class of connectors.
    """
    missing = [hook for hook in HOOKS if not hasattr(base, hook)]
    missing += [name for name in ("hash_block_size", "kv_cache_groups") if not hasattr(kv_cache_config, name)]
    if missing:
        raise UnsupportedEngine(
            f"this vLLM has no {', '.join(missing)}, which the connector needs; install one of the tested versions: "
            f"{', '.join(TESTED)}"
        )
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedEngine("the connector does not serve pipeline parallelism; use tensor parallelism")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedEngine(f"the connector does not serve {name} above 1; set it to 1")
    check_drafter(vllm_config)
    if vllm_config.kv_transfer_config.kv_role != "kv_both":
        raise UnsupportedEngine('the connector both stores and loads blocks; set "kv_role":"kv_both"')
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in CRYPTOGRAPHIC:
        raise UnsupportedEngine(
            f"--prefix-caching-hash-algo {algorithm} is not supported, because different prompts may have equal hashes "
            f"and would get each other's blocks; use {' or '.join(CRYPTOGRAPHIC)}"
        )
