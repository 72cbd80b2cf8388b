"""What vLLM's `--kv-transfer-config` names as the module of its connector, of its offloading, and of a tier of it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.engine.doors.vllm_connector.connector import KVTierConnector
    from kvtier.engine.doors.vllm_offloading.cpu_spec import CpuTieringOffloadingSpec

__all__ = ["CpuTieringOffloadingSpec", "KVTierConnector"]

ROOMS = {  # each needs parts of vLLM that the others do not, and that another version may lack
    "KVTierConnector": "kvtier.engine.doors.vllm_connector.connector",
    "CpuTieringOffloadingSpec": "kvtier.engine.doors.vllm_offloading.cpu_spec",
}


def __getattr__(name: str) -> Any:
    if name not in ROOMS:
        raise AttributeError(f"module {__name__} has no {name}")
    return getattr(import_module(ROOMS[name]), name)
