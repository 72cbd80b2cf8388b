"""Schedules: when a fake device runs operations that may run. Two of them find bugs."""

import random
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """Chooses among the orders that streams and events leave open."""

    def runs_at_once(self, stream_id: int, number: int) -> bool:
        """Whether that operation of a stream runs when it is enqueued, if what it waits for has run."""


@dataclass(frozen=True)
class Late:
    """No operation runs before the host waits for it, or for one that comes after it."""

    def __str__(self) -> str:
        return "late"

    def runs_at_once(self, stream_id: int, number: int) -> bool:
        return False


@dataclass(frozen=True)
class Seeded:
    """Half of the operations run at once. The choice depends on the seed and the operation, not on threads."""

    seed: int

    def __str__(self) -> str:
        return f"seed{self.seed}"

    def runs_at_once(self, stream_id: int, number: int) -> bool:
        return random.Random(f"{self.seed}/{stream_id}/{number}").random() < 0.5
