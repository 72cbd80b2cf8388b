"""The module to name in vLLM's `--kv-transfer-config`, for the connector, the offloading spec or the secondary tier."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.connectors.vllm_connector.connector import KVTierConnector
    from kvtier.connectors.vllm_offloading.cpu_spec import CpuTieringOffloadingSpec
    from kvtier.connectors.vllm_offloading.tier import KVTier

__all__ = ["CpuTieringOffloadingSpec", "KVTier", "KVTierConnector"]

_HOMES = {  # each is imported at its first use, because it depends on parts of vLLM that some versions lack
    "KVTierConnector": "vllm_connector.connector",
    "CpuTieringOffloadingSpec": "vllm_offloading.cpu_spec",
    "KVTier": "vllm_offloading.tier",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"kvtier.connectors.{_HOMES[name]}"), name)
