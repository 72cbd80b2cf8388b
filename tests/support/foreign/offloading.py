"""vLLM's own offloading on a CPU, with a disk below its host memory: kvtier's, or vLLM's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from foreign.running import Vllm

SPEC = {"spec_name": "CpuTieringOffloadingSpec", "spec_module_path": "kvtier.connectors.vllm"}


def kvtier_tier(folder: Path, capacity: str = "1GiB", **settings: object) -> dict[str, Any]:
    """kvtier's disk, as `secondary_tiers` names it."""
    return {
        "type": "KVTier",
        "module_path": "kvtier.connectors.vllm",
        "path": str(folder),
        "capacity": capacity,
        **settings,
    }


def fs_tier(folder: Path) -> dict[str, Any]:
    """vLLM's own disk: a file for each block."""
    return {"type": "fs", "root_dir": str(folder)}


def offloading_config(tiers: list[dict[str, Any]], host_bytes: int, **extra: object) -> dict[str, Any]:
    """What has vLLM offload to host memory of a name of its own, and to *tiers* below it, as a value."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": f"kvtier-{uuid4()}",
        "kv_connector_extra_config": {**SPEC, "cpu_bytes_to_use": host_bytes, "secondary_tiers": tiers, **extra},
    }


def host_memory_of(transfer: dict[str, Any]) -> list[Path]:
    """The files of vLLM's host memory, which it leaves behind when it is killed."""
    return list(Path("/dev/shm").glob(f"vllm_offload_{transfer['engine_id']}*"))


@contextmanager
def offloading_vllm(
    python: str, model: Path, tiers: list[dict[str, Any]], host_bytes: int = 256 << 20, before: str = "", **options: Any
) -> Iterator[Vllm]:
    """vLLM with these tiers. It is killed at the end, so the host memory that it leaves behind is removed."""
    transfer = offloading_config(tiers, host_bytes)
    try:
        with Vllm(python, model, transfer, before, disable_hybrid_kv_cache_manager=False, **options) as running:
            yield running
    finally:
        for left in host_memory_of(transfer):
            left.unlink()
