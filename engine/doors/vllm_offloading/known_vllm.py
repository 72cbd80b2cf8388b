"""Which vLLM its offloading on kvtier knows: the one place where that is said."""

from inspect import signature
from typing import Any

from kvtier.engine.doors.vllm_connector.engine_layout import NotServed

TESTED = ("0.32",)  # with the real engine: tests/engine/doors/test_vllm_offloading.py
OF_REGION = ("engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size")
OF_SPEC = ("num_chunks", "kv_bytes_per_chunk", "cpu_page_size_per_worker", "replicated_layout", "blocks_per_chunk")


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
