"""SidecarStanding: whether an engine's sidecar is there."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SidecarStanding:
    """An engine's sidecar at one moment, by value."""

    path: str  # of its socket
    is_attached: bool  # it is there, and answers
    num_attached: int  # times that the engine attached to it
    attached_s: float  # for how long it has been; 0 while it is not
