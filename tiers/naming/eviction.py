"""EvictionCause: why a tier forgot a block."""

from enum import StrEnum


class EvictionCause(StrEnum):
    """Why a tier forgot a block. All but `ROOM` say that a larger tier would not have kept it."""

    ROOM = "room"  # newer blocks needed its place
    QUOTA = "quota"  # its tenant had more than its quota
    LAYOUT = "layout"  # its place went to blocks of another layout of a sidecar
    SUPERSEDED = "superseded"  # it was not full, and a request went on from all of its tokens
    CORRUPT = "corrupt"  # its bytes were not what had been stored
    UNREADABLE = "unreadable"  # reading it failed, or hung
    CLEARED = "cleared"  # someone asked for it

    @property
    def is_wanted(self) -> bool:
        """Whether the tier did not want to keep the block. Else it was a mishap."""
        return self not in (EvictionCause.CORRUPT, EvictionCause.UNREADABLE)
