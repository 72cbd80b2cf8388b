"""Counts of what the connector has done, for logs and metrics."""

from dataclasses import dataclass, fields

METRIC_PREFIX = "kvtier_vllm_"  # of their names in vLLM's metrics


@dataclass(slots=True)
class Counts:
    """Totals since they were taken last."""

    host_tokens: int = 0  # that were loaded from host memory
    disk_tokens: int = 0  # that were loaded, and on disk only when they were asked for
    remote_tokens: int = 0  # that were loaded, and in the remote tier only when they were asked for
    late_loads: int = 0  # prompts that went on with less than was found, at their deadline
    stored_blocks: int = 0
    unstored_blocks: int = 0  # that found no slot before their request had ended
    corrupt_blocks: int = 0
    errors: int = 0

    def take(self) -> dict[str, int]:
        """Hand them over, and begin at 0 again."""
        taken = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in taken:
            setattr(self, name, 0)
        return taken
