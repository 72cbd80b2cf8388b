"""Counts of loads, stores and errors of the connector, for logs and metrics."""

from dataclasses import astuple, dataclass, field, fields
from enum import StrEnum

METRIC_PREFIX = "kvtier_vllm_"  # of the names of these counts in vLLM's metrics
UNSTORED = "unstored_blocks"  # the only count that is split by reason


class Unstored(StrEnum):
    """The reason why blocks that vLLM computed were not stored."""

    NO_SIDECAR = "no_sidecar"  # no sidecar is attached, or it does not answer
    UNMAPPED = "unmapped"  # a worker had not mapped the sidecar's memory yet
    NO_ROOM = "no_room"  # the sidecar had fewer free slots than the engine requested
    LATE = "late"  # slots were not reserved in time
    FAILED = "failed"  # a worker could not copy the blocks, vLLM had changed their pages, or their digests failed
    RESTING = "resting"  # the connector stores nothing for a minute after an internal error


@dataclass(slots=True)
class Counts:
    """The connector's counts since the last `take`."""

    host_tokens: int = 0  # loaded from host memory
    disk_tokens: int = 0  # loaded, and only on disk when the load began
    remote_tokens: int = 0  # loaded, and only in the remote tier when the load began
    late_loads: int = 0  # prompts that continued at their deadline with fewer blocks than were found
    stored_blocks: int = 0
    unstored_blocks: dict[Unstored, int] = field(default_factory=lambda: dict.fromkeys(Unstored, 0))
    corrupt_blocks: int = 0
    errors: int = 0

    def take(self) -> dict[str, int]:
        """Return the counts by their names in `COUNT_NAMES`, and reset them to 0."""
        before = {each.name: getattr(self, each.name) for each in fields(self) if each.name != UNSTORED}
        unstored = {unstored_name(why): number for why, number in self.unstored_blocks.items()}
        for each, at_first in zip(fields(self), astuple(Counts()), strict=True):
            setattr(self, each.name, at_first)
        return before | unstored


def unstored_name(why: Unstored) -> str:
    """Return the key in `Counts.take` for the number of blocks that were not stored for the reason *why*."""
    return f"{UNSTORED} {why}"


PLAIN_NAMES = tuple(each.name for each in fields(Counts) if each.name != UNSTORED)
COUNT_NAMES = (*PLAIN_NAMES, *map(unstored_name, Unstored))
DOCUMENTATION = {
    "host_tokens": "Prompt tokens loaded from host memory.",
    "disk_tokens": "Prompt tokens loaded from disk.",
    "remote_tokens": "Prompt tokens loaded from the remote tier.",
    "late_loads": "Prompts that reached their deadline and continued with fewer blocks than were found.",
    "stored_blocks": "Blocks stored.",
    UNSTORED: "Computed blocks that were not stored before their request ended, by reason.",
    "corrupt_blocks": "Blocks whose bytes did not match their digest and were computed again.",
    "errors": "Internal errors of the connector; it finds and stores nothing for a minute after each.",
}
