"""The time that a long benchmark has, what it says meanwhile, and a row for what failed."""

import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.report import Row

FAILED = "failed"  # the unit of a row for what did


@dataclass(frozen=True)
class Clock:
    """Started then, should be done by then; monotonic seconds."""

    started: float
    ends: float

    @classmethod
    def of(cls, seconds: float) -> "Clock":
        """One that starts now."""
        now = time.monotonic()
        return cls(now, now + seconds)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def left(self) -> float:
        """Seconds to the end; negative after it."""
        return self.ends - time.monotonic()

    def part(self, share: float) -> "Clock":
        """A nearer end: that share of what is left."""
        return replace(self, ends=time.monotonic() + share * max(0.0, self.left))

    def note(self, text: str) -> None:
        """Say what goes on."""
        print(f"[{self.elapsed:6.1f} s] {text}", file=sys.stderr, flush=True)


def failure(what: str, error: Exception) -> Row:
    """The row for what could not be measured; the whole story goes to stderr."""
    traceback.print_exception(error)
    return Row(f"{what}: {type(error).__name__}", 1, FAILED, "0", False)


def has_failed(rows: Sequence[Row]) -> bool:
    """Whether anything could not be measured."""
    return any(row.unit == FAILED for row in rows)
