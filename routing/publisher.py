"""Publisher: where a replica tells what it has."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Publisher:
    """The ZMQ endpoints of the replica called *name*: where it publishes KV events of *topic*, and where it sends what
    was missed again, if it does."""

    name: str
    events: str
    replay: str | None = None
    topic: str = ""
