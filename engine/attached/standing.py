"""The state of an engine's connection to its sidecar."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SidecarStanding:
    """State of the connection to a sidecar at one moment."""

    path: str  # of its socket
    is_attached: bool  # whether the sidecar is attached and answers
    num_attached: int  # how often the engine has attached
    attached_s: float  # seconds since it attached last; 0 while it is not attached
