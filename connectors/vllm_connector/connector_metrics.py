"""What vLLM's logs and its `/metrics` say of the connector."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier.connectors.vllm_connector.counts import (
    COUNT_NAMES,
    METRIC_PREFIX,
    PLAIN_NAMES,
    UNSTORED,
    Unstored,
    unstored_name,
)

REASON = "reason"  # the label of blocks that were not stored
DOCUMENTATION = {
    "host_tokens": "prompt tokens loaded from host memory",
    "disk_tokens": "prompt tokens loaded from disk",
    "remote_tokens": "prompt tokens loaded from the tier that machines share",
    "late_loads": "prompts that went on with less than was found, at their deadline",
    "stored_blocks": "blocks stored",
    UNSTORED: "blocks that were computed and not stored before their request had ended, by reason",
    "corrupt_blocks": "blocks whose bytes were not what they were, computed again",
    "errors": "errors of the connector itself; it rests for a minute after each",
}


class ConnectorStats(KVConnectorStats):
    """`Counts` of one interval, by name."""

    def reset(self) -> None:
        self.data = dict[str, Any]()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return ConnectorStats({name: self.data.get(name, 0) + other.data.get(name, 0) for name in COUNT_NAMES})

    def reduce(self) -> dict[str, int | float]:
        return {f"kvtier {name.replace('_', ' ')}": number for name, number in self.data.items() if number}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ConnectorMetrics(KVConnectorPromMetrics):
    """Counters `kvtier_vllm_…` in vLLM's registry, with its labels."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name in (*PLAIN_NAMES, UNSTORED):
            labels = [*labelnames, REASON] if name == UNSTORED else labelnames
            counter = self._counter_cls(
                name=f"{METRIC_PREFIX}{name}", documentation=DOCUMENTATION[name], labelnames=labels
            )
            for engine, values in per_engine_labelvalues.items():
                if name == UNSTORED:
                    for why in Unstored:
                        self._counters[unstored_name(why), engine] = counter.labels(*values, why.value)
                else:
                    self._counters[name, engine] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name in COUNT_NAMES:
            self._counters[name, engine_idx].inc(transfer_stats_data.get(name, 0))
