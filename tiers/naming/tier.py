"""The names of the tiers, and the reasons why a token had to be recomputed."""

from enum import StrEnum


class Tier(StrEnum):
    """A tier in which a block can be found, warmest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"  # a store that machines share

    @property
    def depth(self) -> int:
        """How cold the tier is, 0 for the warmest. A prefix's tokens count for the coldest tier that they came from."""
        return list(Tier).index(self)


class Reason(StrEnum):
    """Why a prompt token was computed although a cache exists."""

    NEVER_SEEN = "never_seen"
    EVICTED_FROM_DEVICE = "evicted_from_device"
    EVICTED_FROM_HOST = "evicted_from_host"
    EVICTED_FROM_DISK = "evicted_from_disk"
    EVICTED_FROM_REMOTE = "evicted_from_remote"
    CAPACITY = "capacity"  # no slots to promote into
    CORRUPT = "corrupt"  # found, but its bytes were not what had been stored
    FAILED = "failed"  # found, but the copy failed
    DEADLINE = "deadline"  # found, but the copy was too late
    COST = "cost"  # found, but computing it was expected to be faster than loading it
    SKIPPED = "skipped"  # the request asked not to read the cache, or so much of it
    SCORED = "scored"  # found, but the request asked for log probabilities, which only computing gives
    ABORTED = "aborted"  # the request ended before its prefix had come
    LAST_BLOCK = "last_block"  # always computed: the last token's logits are what prefill is for

    @classmethod
    def evicted_from(cls, tier: Tier) -> "Reason":
        """The reason for tokens of a block whose last copy *tier* dropped."""
        return cls(f"evicted_from_{tier}")
