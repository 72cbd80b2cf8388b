"""The tiers, and the reasons why a prompt token is recomputed."""

from enum import StrEnum


class Tier(StrEnum):
    """The tiers of the cache, from the warmest (fastest) to the coldest."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"  # a store shared by several machines

    def __init__(self, _: str) -> None:
        # Position of the tier, 0 for the warmest. A token has a block in each attention group; if the blocks came from
        # several tiers, the token counts as coming from the coldest one.
        self.depth = len(type(self).__members__)


class Reason(StrEnum):
    """The reason why a prompt token was computed in spite of the cache."""

    NEVER_SEEN = "never_seen"
    EVICTED_FROM_DEVICE = "evicted_from_device"
    EVICTED_FROM_HOST = "evicted_from_host"
    EVICTED_FROM_DISK = "evicted_from_disk"
    EVICTED_FROM_REMOTE = "evicted_from_remote"
    NOT_KEPT = "not_kept"  # computed before, but no state or window for resuming there was kept
    CAPACITY = "capacity"  # found, but there were no device slots to promote into
    CORRUPT = "corrupt"  # found, but its bytes differed from the stored ones
    FAILED = "failed"  # found, but the copy failed
    DEADLINE = "deadline"  # found, but the copy was too late
    COST = "cost"  # found, but computing it was expected to be faster than loading it
    SKIPPED = "skipped"  # the request asked not to read the cache, or to read only a part of it
    SCORED = "scored"  # found, but the request asked for log probabilities, which must be computed
    ABORTED = "aborted"  # the request ended before its prefix was loaded
    LAST_BLOCK = "last_block"  # always computed, because prefill needs the logits of the last token

    @classmethod
    def evicted_from(cls, tier: Tier) -> "Reason":
        """Return the reason why a block's tokens were recomputed if its last copy was evicted from *tier*."""
        return cls(f"evicted_from_{tier}")


class EvictionCause(StrEnum):
    """The reason why a tier evicted a block. A larger tier would avoid only the evictions for `ROOM`."""

    ROOM = "room"  # newer blocks needed its slot
    QUOTA = "quota"  # its tenant exceeded its quota
    LAYOUT = "layout"  # a sidecar, which several models may share, gave its room to blocks of another layout
    SUPERSEDED = "superseded"  # it was a partial block, and a request that continued it has a longer block
    CORRUPT = "corrupt"  # its bytes differed from the stored ones
    UNREADABLE = "unreadable"  # reading it failed or hung
    CLEARED = "cleared"  # an operator or a caller requested it

    @property
    def is_wanted(self) -> bool:
        """True if the tier evicted the block on purpose, not because of an error."""
        return self not in (EvictionCause.CORRUPT, EvictionCause.UNREADABLE)
