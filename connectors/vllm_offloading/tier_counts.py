"""Counts of loads, stores and errors of `KVTier`, for vLLM's metrics."""

from dataclasses import dataclass, fields

METRIC_PREFIX = "kvtier_tier_"  # of the counts' names in vLLM's metrics


@dataclass(slots=True)
class TierCounts:
    """Counts of blocks and errors of `KVTier` since the last `take`."""

    loaded_blocks: int = 0
    failed_loads: int = 0  # blocks that a lookup found, but that were missing, corrupt or unreadable when loaded
    corrupt_blocks: int = 0  # the part of `failed_loads` whose bytes did not match their digest
    stored_blocks: int = 0  # including blocks that were on disk already
    unstored_blocks: int = 0  # refused by the disk
    offered_again_blocks: int = 0  # the part of `unstored_blocks` that was offered to the disk again
    waited_requests: int = 0  # that waited for room in vLLM's host pool
    errors: int = 0  # internal errors of the tier

    def take(self) -> dict[str, int]:
        """Return the counts that are not 0, and reset all to 0."""
        taken = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in taken:
            setattr(self, name, 0)
        return {name: number for name, number in taken.items() if number}


DOCUMENTATION = {
    "loaded_blocks": "Blocks loaded from disk and verified.",
    "failed_loads": "Blocks that were found on disk, could not be loaded, and were computed again.",
    "corrupt_blocks": "Blocks on disk whose bytes did not match their digest and were computed again.",
    "stored_blocks": "Blocks that vLLM offered and that are on disk.",
    "unstored_blocks": "Blocks that vLLM offered and the disk did not store.",
    "offered_again_blocks": "Blocks that the disk did not store and that were offered to it again.",
    "waited_requests": "Requests that waited until vLLM's host memory had room for their blocks from disk.",
    "errors": "Internal errors of the tier; it finds and stores nothing for a minute after each.",
}
GAUGES = {
    "blocks": "Blocks of this model on disk.",
    "stored_bytes": "Bytes on disk, of all models.",
    "capacity_bytes": "Capacity of the disk in bytes.",
}
