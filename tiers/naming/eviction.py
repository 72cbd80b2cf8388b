"""EvictionCause: the reasons why a tier evicts a block."""

from enum import StrEnum


class EvictionCause(StrEnum):
    """The reason why a tier evicted a block. In all cases but `ROOM` a larger tier would have evicted it too."""

    ROOM = "room"  # newer blocks needed its slot
    QUOTA = "quota"  # its tenant exceeded its quota
    LAYOUT = "layout"  # its slot was reassigned to another layout of a sidecar
    SUPERSEDED = "superseded"  # it was not full, and a request has continued after all of its tokens
    CORRUPT = "corrupt"  # its bytes differed from the stored ones
    UNREADABLE = "unreadable"  # reading it failed or hung
    CLEARED = "cleared"  # an operator or a caller requested it

    @property
    def is_wanted(self) -> bool:
        """Whether the tier evicted the block on purpose, not because of an error."""
        return self not in (EvictionCause.CORRUPT, EvictionCause.UNREADABLE)
