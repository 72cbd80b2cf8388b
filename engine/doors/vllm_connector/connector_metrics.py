"""What vLLM's logs and its `/metrics` say of the connector."""

from dataclasses import fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier.engine.doors.vllm_connector.counts import METRIC_PREFIX, Counts

NAMES = tuple(each.name for each in fields(Counts))
DOCUMENTATION = {
    "host_tokens": "prompt tokens loaded from host memory",
    "disk_tokens": "prompt tokens loaded from disk",
    "remote_tokens": "prompt tokens loaded from the tier that machines share",
    "late_loads": "prompts that went on with less than was found, at their deadline",
    "stored_blocks": "blocks stored",
    "unstored_blocks": "blocks that found no host slot before their request had ended",
    "corrupt_blocks": "blocks whose bytes were not what they were, computed again",
    "errors": "errors of the connector itself; it rests for a minute after each",
}


class ConnectorStats(KVConnectorStats):
    """`Counts` of one interval, by name."""

    def reset(self) -> None:
        self.data = dict[str, Any]()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return ConnectorStats({name: self.data.get(name, 0) + other.data.get(name, 0) for name in NAMES})

    def reduce(self) -> dict[str, int | float]:
        return {f"kvtier {name.replace('_', ' ')}": number for name, number in self.data.items() if number}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ConnectorMetrics(KVConnectorPromMetrics):
    """Counters `kvtier_vllm_…` in vLLM's registry, with its labels."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name in NAMES:
            counter = self._counter_cls(
                name=f"{METRIC_PREFIX}{name}", documentation=DOCUMENTATION[name], labelnames=labelnames
            )
            for engine, values in per_engine_labelvalues.items():
                self._counters[name, engine] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name in NAMES:
            self._counters[name, engine_idx].inc(transfer_stats_data.get(name, 0))
