"""The checks that a tier is not larger than this machine's memory, or than the file system of the tier's folder."""

import os
import shutil
from pathlib import Path

from kvtier.engine.config import DiskConfig, size_text


def refuse_more_than_memory(setting: str, num_bytes: int) -> None:
    """Raise ValueError if *num_bytes*, the value of *setting*, is more than the memory of this machine."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > memory_bytes:
        raise ValueError(
            f"{setting} {size_text(num_bytes)}: is more than the memory of this machine, {size_text(memory_bytes)}; "
            "give a smaller size"
        )


def refuse_more_than_disk(disk: DiskConfig) -> None:
    """Raise ValueError if the file system of the disk tier's folder could not hold the tier even if it were empty.

    A folder whose file system does not tell its size is accepted. So is one that cannot be accessed, because opening
    the store reports that.
    """
    folder = Path(disk.path).absolute()
    try:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        disk_bytes = shutil.disk_usage(there).total
    except OSError:
        return
    if 0 < disk_bytes < disk.capacity:
        raise ValueError(
            f"disk.capacity {size_text(disk.capacity)}: is more than the whole file system of {disk.path}, "
            f"{size_text(disk_bytes)}; give a smaller size, or a folder on a larger disk"
        )
