"""Whether a data file left by an earlier process can be trusted.

LMDB runs without syncing, so its file is whole after kill -9 (the kernel still writes the pages) but
not after a crash of the machine. Reading a damaged file may crash, so the answer is kept beside it.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_LAYOUT = "kvtier-store-1"  # the sub-databases and their rows; record headers have a version of their own
_NAME = "boot_mark"


def current_boot_id() -> str:
    """Changes with every boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class BootMark:
    """The boot in which the data file was last open, and whether it was closed and synced since."""

    boot_id: str
    is_clean: bool
    layout: str = _LAYOUT

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The mark in *folder*; None if there is none or it makes no sense."""
        try:
            layout, boot_id, state = (folder / _NAME).read_text().split()
        except (OSError, ValueError):
            return None
        return cls(boot_id, state == "clean", layout)

    def write(self, folder: Path) -> None:
        """Replace the mark in *folder*, durably and in one step."""
        fresh = folder / f"{_NAME}.new"
        with fresh.open("w") as file:
            file.write(f"{self.layout}\n{self.boot_id}\n{'clean' if self.is_clean else 'open'}\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(folder / _NAME)
        sync_folder(folder)


def reason_to_distrust(folder: Path) -> str | None:
    """Why the data file in *folder* must not even be opened; None if it may."""
    mark = BootMark.read(folder)
    if mark is None:
        return "it has no readable boot mark"
    if mark.layout != _LAYOUT:
        return f"its layout is {mark.layout}, this program writes {_LAYOUT}"
    if not mark.is_clean and mark.boot_id != current_boot_id():
        return "the machine went down while it was open"
    return None


def sync_folder(folder: Path) -> None:
    """Make renames and removals in *folder* durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
