"""The budget of bytes that may be written to the disk per day."""

import math
from collections.abc import Callable

DAY_S = 86_400.0
RESERVE = 0.25  # share of a day's bytes kept for blocks that are used again: six hours' refill


class WriteBudget:
    """A token bucket of one day's bytes that refills evenly: at most N + 1 days' bytes are written in N days.

    A quarter of the bucket is a reserve for blocks that are used again. The caller asks before it writes, and calls
    `spend` afterwards with the bytes as stored, if known. Concurrent writes may overdraw the bucket; refills repay that
    first. Owned by the tiers' thread.
    """

    def __init__(self, bytes_per_day: int | None, clock: Callable[[], float], written_last_day_bytes: int = 0) -> None:
        """Create a full bucket, less the bytes written in the day before the start; None is no limit, 0 writes nothing.

        *written_last_day_bytes* count as if written just now, so that restarts do not raise the limit. Raises
        ValueError if a number of bytes is negative.
        """
        if (bytes_per_day or 0) < 0 or written_last_day_bytes < 0:
            raise ValueError(f"{bytes_per_day} bytes a day, {written_last_day_bytes} written: neither can be negative")
        self._bytes_per_day = bytes_per_day
        self._clock = clock
        self._left_bytes: float = max(0, (bytes_per_day or 0) - written_last_day_bytes)
        self._left_at = clock()

    @property
    def left_bytes(self) -> int | None:
        """Bytes that may be written now, below zero if overdrawn; None if there is no limit."""
        return None if self._bytes_per_day is None else math.floor(self._left_now(self._bytes_per_day))

    def allows(self, num_bytes: int) -> bool:
        """Return whether *num_bytes* may be written now, if necessary from the reserve."""
        return self._bytes_per_day is None or num_bytes <= self._left_now(self._bytes_per_day)

    def spares(self, num_bytes: int) -> bool:
        """Return whether *num_bytes* may be written now without touching the reserve."""
        return self._bytes_per_day is None or self.allows(num_bytes + math.ceil(RESERVE * self._bytes_per_day))

    def spend(self, num_bytes: int) -> None:
        """Take written bytes out of the bucket, whether they were allowed or not."""
        if self._bytes_per_day is not None:
            self._left_bytes = self._left_now(self._bytes_per_day) - num_bytes
            self._left_at = self._clock()

    def check(self) -> None:
        """Raise AssertionError if the bucket has more than one day's bytes."""
        assert self.left_bytes is None or self.left_bytes <= (self._bytes_per_day or 0), "more than one day's bytes"

    def _left_now(self, bytes_per_day: int) -> float:
        refill = (self._clock() - self._left_at) / DAY_S * bytes_per_day
        return min(bytes_per_day, self._left_bytes + refill)
