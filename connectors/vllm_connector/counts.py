"""Counts of what the connector has done, for logs and metrics."""

from dataclasses import astuple, dataclass, field, fields
from enum import StrEnum

METRIC_PREFIX = "kvtier_vllm_"  # of their names in vLLM's metrics
UNSTORED = "unstored_blocks"  # the count that has reasons


class Unstored(StrEnum):
    """Why blocks that vLLM computed were not stored."""

    NO_SIDECAR = "no_sidecar"  # none is attached, or it does not answer
    UNMAPPED = "unmapped"  # a worker had not mapped the sidecar's memory yet
    NO_ROOM = "no_room"  # the sidecar had fewer free slots than it was asked for
    LATE = "late"  # slots had not been reserved in time
    FAILED = "failed"  # a worker could not copy them, vLLM had changed their pages, or there are no digests
    RESTING = "resting"  # the connector stores nothing for a while after an error of its own


@dataclass(slots=True)
class Counts:
    """Totals since they were taken last."""

    host_tokens: int = 0  # that were loaded from host memory
    disk_tokens: int = 0  # that were loaded, and on disk only when they were asked for
    remote_tokens: int = 0  # that were loaded, and in the remote tier only when they were asked for
    late_loads: int = 0  # prompts that went on with less than was found, at their deadline
    stored_blocks: int = 0
    unstored_blocks: dict[Unstored, int] = field(default_factory=lambda: dict.fromkeys(Unstored, 0))
    corrupt_blocks: int = 0
    errors: int = 0

    def take(self) -> dict[str, int]:
        """Hand them over by their names in `COUNT_NAMES`, and begin at 0 again."""
        before = {each.name: getattr(self, each.name) for each in fields(self) if each.name != UNSTORED}
        unstored = {unstored_name(why): number for why, number in self.unstored_blocks.items()}
        for each, at_first in zip(fields(self), astuple(Counts()), strict=True):
            setattr(self, each.name, at_first)
        return before | unstored


def unstored_name(why: Unstored) -> str:
    """Return the name of the blocks that were not stored for this reason."""
    return f"{UNSTORED} {why}"


PLAIN_NAMES = tuple(each.name for each in fields(Counts) if each.name != UNSTORED)
COUNT_NAMES = (*PLAIN_NAMES, *map(unstored_name, Unstored))
