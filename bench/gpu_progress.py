"""The deadline of a long benchmark, its progress on stderr, and rows for parts that failed."""

import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.report import Row

FAILED = "failed"  # unit of the row of a part that failed


@dataclass(frozen=True)
class Clock:
    """The start of a benchmark, and the end that it should keep; monotonic seconds."""

    started: float
    ends: float

    @classmethod
    def of(cls, seconds: float) -> "Clock":
        """A clock that starts now and ends in *seconds*."""
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
        """A clock whose end leaves *share* of the time that is left."""
        return replace(self, ends=time.monotonic() + share * max(0.0, self.left))

    def note(self, text: str) -> None:
        """Print *text* to stderr, with the time since the start."""
        print(f"[{self.elapsed:6.1f} s] {text}", file=sys.stderr, flush=True)


def failure(what: str, error: Exception) -> Row:
    """The row for a part that failed with *error*; the traceback goes to stderr."""
    traceback.print_exception(error)
    return Row(f"{what}: {type(error).__name__}", 1, FAILED, "0", False)


def has_failed(rows: Sequence[Row]) -> bool:
    """Whether a part failed."""
    return any(row.unit == FAILED for row in rows)
