"""How long this process has run."""

import os
import time
from pathlib import Path

_STAT = Path("/proc/self/stat")
_STARTED_FIELD = 22  # of proc(5), counted from 1: when the process started, in clock ticks since boot
_IMPORTED_AT = time.monotonic()


def process_age_s(stat: Path = _STAT) -> float:
    """Return the seconds since the process started, imports included.

    Where *stat* cannot be read, the seconds since this module was imported.
    """
    try:
        fields = stat.read_text().rpartition(")")[2].split()  # from the third on: the name before may have blanks
        started_s = int(fields[_STARTED_FIELD - 3]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED_AT
