"""The memory that this process and its CUDA device use."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """Bytes of memory at one moment. The numbers of the device are None for a process that does not use CUDA."""

    resident_bytes: int | None  # memory of the process, including shared memory
    device_used_bytes: int | None = None  # by all processes
    device_total_bytes: int | None = None


def memory_statistics(statm: Path = _STATM) -> MemoryStatistics:
    """Return the memory in use now. Any thread may call this.

    The resident bytes are None if *statm* cannot be read, for example on a system other than Linux.
    """
    resident: int | None
    try:
        resident = int(statm.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        resident = None
    torch = sys.modules.get("torch")  # not imported here, because a sidecar does not need it
    if torch is None or not torch.cuda.is_initialized():
        return MemoryStatistics(resident)
    free, total = torch.cuda.mem_get_info()
    return MemoryStatistics(resident, total - free, total)
