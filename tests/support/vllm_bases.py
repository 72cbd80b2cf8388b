"""The classes of vLLM 0.33 that our endpoints derive from, as far as they are needed to import these without vLLM."""

import enum
import importlib
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import pytest


class OffloadingWorker(ABC):
    """vLLM 0.33's, by its abstract methods."""

    @abstractmethod
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool: ...

    @abstractmethod
    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool: ...

    @abstractmethod
    def get_finished(self) -> list[Any]: ...

    @abstractmethod
    def wait(self, job_ids: set[int]) -> None: ...


class TransferResult(NamedTuple):
    """What vLLM is told of a job that has ended."""

    job_id: int
    success: bool
    transfer_size: int | None
    transfer_time: float


class KVConnectorBase:
    """vLLM 0.33's, by what it says of itself where a connector does not."""

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True


class KVConnectorRole(enum.Enum):
    """In which process a connector is."""

    SCHEDULER = 0
    WORKER = 1


@dataclass
class KVConnectorTransferResults:
    """Which requests' transfers have ended, by a connector."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class CacheHitSource(enum.Enum):
    """Where a hit came from."""

    HOST = 0
    DISK = 1
    EXTERNAL_UNSPECIFIED = 2


class KVConnectorFactory:
    """The connectors that vLLM knows by name."""

    registered: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls.registered:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls.registered[name] = (module_path, class_name)


class _Named:
    """A class of which only the name is needed."""


KV_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
V1 = f"{KV_CONNECTOR}.v1"
MODULES: dict[str, dict[str, object]] = {
    "vllm.config": {"VllmConfig": _Named},
    "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: 0},
    f"{KV_CONNECTOR}.factory": {"KVConnectorFactory": KVConnectorFactory},
    f"{V1}.base": {
        "KVConnectorBase_V1": KVConnectorBase,
        "KVConnectorMetadata": type("KVConnectorMetadata", (ABC,), {}),
        "KVConnectorRole": KVConnectorRole,
        "KVConnectorTransferResults": KVConnectorTransferResults,
        "KVConnectorWorkerMetadata": type("KVConnectorWorkerMetadata", (ABC,), {}),
        "SupportsHMA": type("SupportsHMA", (), {}),
    },
    f"{V1}.metrics": {
        "KVConnectorPromMetrics": type("KVConnectorPromMetrics", (), {}),
        "KVConnectorStats": type("KVConnectorStats", (), {}),
    },
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": CacheHitSource},
    "vllm.v1.kv_offload.base": {"OffloadingWorker": OffloadingWorker, "TransferResult": TransferResult},
}


def imported_with_vllm(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Return the module of ours, imported with these classes in place of vLLM's, for this call alone."""
    for module_name, values in MODULES.items():
        module = ModuleType(module_name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module_name, module)
    before = set(sys.modules)
    found = importlib.import_module(name)
    for new in set(sys.modules) - before:
        if new.startswith("kvtier.connectors."):
            del sys.modules[new]
    return found
