"""What is known of a data file left by an earlier process: in which boot it was last open, and how.

LMDB's file is whole after kill -9 (the kernel still writes the pages) but, unless it was synced, not after a crash of
the machine. Reading a damaged file may crash, so the answer is kept beside it.
"""

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

_LAYOUT = "kvtier-store-5"  # the sub-databases and their rows; record headers have a version of their own
_NAME = "boot_mark"
_MARK_BYTES = 128  # longer than any mark, and within one sector


class FileState(StrEnum):
    """How the data file was left, if nothing is heard of it since."""

    CLEAN = "clean"  # all of it synced, and nothing written since: closed, or about to be compacted
    PROCESS = "process"  # open, nothing synced
    INTERVAL = "interval"  # open, synced at checkpoints
    COMMIT = "commit"  # open, synced with every change
    DAMAGED = "damaged"  # its tree was found broken


def current_boot_id() -> str:
    """Changes with every boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class BootMark:
    """The boot in which the data file was last open, and its state then."""

    boot_id: str
    state: FileState
    layout: str = _LAYOUT

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The mark in *folder*; None if there is none or it makes no sense. OSError if it cannot be read."""
        try:
            layout, boot_id, state = (folder / _NAME).read_text().split()
            return cls(boot_id, FileState(state), layout)
        except (FileNotFoundError, ValueError):
            return None

    def write(self, folder: Path) -> None:
        """Replace the mark in *folder*, durably and in one step: a sector is written whole or not at all.

        In its place, so that a store can be opened and closed on a full disk.
        """
        text = f"{self.layout}\n{self.boot_id}\n{self.state}".ljust(_MARK_BYTES - 1) + "\n"
        is_new = not (folder / _NAME).exists()
        with open(folder / _NAME, "r+b", opener=open_or_make) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_folder(folder)

    @property
    def is_of_another_layout(self) -> bool:
        """Whether this program cannot read the file."""
        return self.layout != _LAYOUT

    @property
    def saw_crash(self) -> bool:
        """Whether the machine went down while the file was open."""
        return self.state is not FileState.CLEAN and self.boot_id != current_boot_id()


def open_or_make(path: str, flags: int) -> int:
    """An opener for `open`: of files that only their owner may read, as all of a store."""
    return os.open(path, flags | os.O_CREAT, 0o600)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in *folder* durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
