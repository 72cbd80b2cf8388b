"""The connector's statistics in vLLM's logs and in its `/metrics`."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier.connectors.vllm_connector.counts import (
    COUNT_NAMES,
    DOCUMENTATION,
    METRIC_PREFIX,
    PLAIN_NAMES,
    UNSTORED,
    Unstored,
    unstored_name,
)

REASON = "reason"  # label of the metric for blocks that were not stored


class ConnectorStats(KVConnectorStats):
    """The connector's `Counts` by name, for one interval of vLLM's logs and metrics."""

    def reset(self) -> None:
        self.data = dict[str, Any]()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return ConnectorStats({name: self.data.get(name, 0) + other.data.get(name, 0) for name in COUNT_NAMES})

    def reduce(self) -> dict[str, int | float]:
        return {f"kvtier {name.replace('_', ' ')}": number for name, number in self.data.items() if number}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ConnectorMetrics(KVConnectorPromMetrics):
    """The counters `kvtier_vllm_*` in vLLM's registry, with vLLM's labels."""

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
