"""Metrics of the process's memory and of the device's."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from kvtier.engine.observability.memory import MemoryStatistics
from kvtier.engine.observability.metrics import names


def memory_metrics(memory: MemoryStatistics) -> Iterator[Metric]:
    """Yield the metrics of *memory*, without those that this process cannot know."""
    for name, value in (
        (names.RESIDENT_MEMORY, memory.resident_bytes),
        (names.DEVICE_MEMORY_USED, memory.device_used_bytes),
        (names.DEVICE_MEMORY, memory.device_total_bytes),
    ):
        if value is not None:
            yield name.of(value)
