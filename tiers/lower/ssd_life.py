"""SsdLife: estimates how much of an SSD's rated endurance has been used up."""

import math
from collections.abc import Callable
from dataclasses import dataclass

YEAR_S = 365.25 * 86_400.0
TERABYTE = 10**12  # decimal, as drive makers count


@dataclass(frozen=True, slots=True)
class SsdLifeStatistics:
    """The wear that kvtier's writes have caused on an SSD.

    Writes of other programs and the drive's write amplification are not included.
    """

    used: float  # share of the rated bytes that has been written; above 1 once the rating is exceeded
    years_left: float  # until *used* reaches 1 at the average write rate since the start; infinite if that is 0


class SsdLife:
    """An estimate of an SSD's wear from the bytes that kvtier has written. It does not query the drive."""

    def __init__(self, endurance_terabytes: float, clock: Callable[[], float], written_bytes: int) -> None:
        """Create the estimate; raises ValueError if *endurance_terabytes* is not positive.

        *endurance_terabytes* is the drive maker's TBW figure, in decimal terabytes. *written_bytes* is the number of
        bytes that kvtier has already written to the drive.
        """
        if endurance_terabytes <= 0:
            raise ValueError(f"SSD endurance is {endurance_terabytes} terabytes written (TBW); give a value above 0")
        self._endurance_bytes = endurance_terabytes * TERABYTE
        self._clock = clock
        self.begin(written_bytes)

    def begin(self, written_bytes: int) -> None:
        """Start to measure the write rate. *written_bytes* is the number of bytes written until now."""
        self._started_at = self._clock()
        self._written_at_start = written_bytes

    def statistics(self, written_bytes: int) -> SsdLifeStatistics:
        """Return the share used and the years left. *written_bytes* is the number of bytes written until now."""
        since_start = written_bytes - self._written_at_start
        left_bytes = max(0.0, self._endurance_bytes - written_bytes)
        years = (self._clock() - self._started_at) / YEAR_S
        years_left = left_bytes / since_start * years if since_start > 0 and years else math.inf
        return SsdLifeStatistics(written_bytes / self._endurance_bytes, years_left)
