"""SsdLife: how much of a drive's endurance has been written."""

import math
from collections.abc import Callable
from dataclasses import dataclass

YEAR_S = 365.25 * 86_400.0
TERABYTE = 10**12  # as the makers of drives count


@dataclass(frozen=True, slots=True)
class SsdLifeStatistics:
    """What kvtier's writes have cost the drive; other programs' writes and the drive's amplification come on top."""

    used: float  # share of the bytes that the drive is made for; above 1 when it has had more
    years_left: float  # until *used* is 1, at the rate since the start; infinite while nothing is written


class SsdLife:
    """How far the bytes written are on the way to the drive's endurance. Numbers only: it asks no drive."""

    def __init__(self, endurance_terabytes: float, clock: Callable[[], float], written_bytes: int) -> None:
        """*endurance_terabytes* is the maker's TBW figure, decimal; *written_bytes* are those of all starts before this
        one, as stored. ValueError if the figure is not positive."""
        if endurance_terabytes <= 0:
            raise ValueError(f"an endurance of {endurance_terabytes} terabytes written; need more than 0")
        self._endurance_bytes = endurance_terabytes * TERABYTE
        self._clock = clock
        self.begin(written_bytes)

    def begin(self, written_bytes: int) -> None:
        """Measure the rate of writing from now on, when *written_bytes* have been written."""
        self._started_at = self._clock()
        self._written_at_start = written_bytes

    def statistics(self, written_bytes: int) -> SsdLifeStatistics:
        """The share used and the years left when *written_bytes* were written, as stored, in this start and before."""
        since_start = written_bytes - self._written_at_start
        left_bytes = max(0.0, self._endurance_bytes - written_bytes)
        years = (self._clock() - self._started_at) / YEAR_S
        years_left = left_bytes / since_start * years if since_start > 0 and years else math.inf
        return SsdLifeStatistics(written_bytes / self._endurance_bytes, years_left)
