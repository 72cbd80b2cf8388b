"""Counts of what `KVTier` has done, for vLLM's metrics."""

from dataclasses import dataclass, fields

METRIC_PREFIX = "kvtier_tier_"  # of their names in vLLM's metrics


@dataclass(slots=True)
class TierCounts:
    """Totals since they were taken last."""

    loaded_blocks: int = 0
    failed_loads: int = 0  # blocks that were found, and then not there, not right or not to be read
    corrupt_blocks: int = 0  # of these, those whose bytes were not what they were
    stored_blocks: int = 0  # with those that were on disk already
    unstored_blocks: int = 0  # that the disk did not take
    offered_again_blocks: int = 0  # of these, those that it was asked to take later
    errors: int = 0  # of the tier itself

    def take(self) -> dict[str, int]:
        """Hand them over, less what is 0, and begin at 0 again."""
        taken = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in taken:
            setattr(self, name, 0)
        return {name: number for name, number in taken.items() if number}


DOCUMENTATION = {
    "loaded_blocks": "blocks loaded from disk, verified",
    "failed_loads": "blocks that were found on disk and could not be loaded; computed again",
    "corrupt_blocks": "blocks on disk whose bytes were not what they were; computed again",
    "stored_blocks": "blocks that vLLM offered and that are on disk",
    "unstored_blocks": "blocks that vLLM offered and the disk did not take",
    "offered_again_blocks": "blocks that the disk had not taken and was offered again",
    "errors": "errors of the tier itself; it rests for a minute after each",
}
GAUGES = {
    "blocks": "blocks of this model on disk",
    "stored_bytes": "bytes on disk, of all models",
    "capacity_bytes": "bytes that may be on disk",
}
