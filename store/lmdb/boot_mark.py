"""The boot mark: a small file from which the next process learns whether it can trust LMDB's data file.

The mark records the boot of the machine in which the data file was last open, and the file's state. After kill -9 the
data file is intact, because the kernel still writes the pages. After a machine crash it is intact only if it was
synced. The mark is a separate file, because reading a damaged data file may crash the process. Without a readable mark
the store starts empty, so the mark is written twice, each time with a checksum.
"""

from dataclasses import dataclass
from enum import StrEnum
from os import fsync
from pathlib import Path
from typing import Self

import xxhash

from kvtier.store.folder import open_or_make, open_private, sync_folder

_LAYOUT = "kvtier-store-7"  # version of the sub-databases and their rows; record headers have their own version
_NAME = "boot_mark"
_COPY_BYTES = 512  # a sector, which is written whole or not at all; longer than any mark
_COPIES_AT = (0, 4096)  # offsets, so far apart that no page and no block of the disk contains both copies


class FileState(StrEnum):
    """State of LMDB's data file, recorded so that the next process knows whether it can trust the file."""

    CLEAN = "clean"  # fully synced and not written since: the file was closed, or is about to be compacted
    PROCESS = "process"  # open, nothing synced
    INTERVAL = "interval"  # open, synced at checkpoints
    COMMIT = "commit"  # open, synced with every change
    DAMAGED = "damaged"  # its tree was found broken


def current_boot_id() -> str:
    """Return the kernel's identifier of this boot, which changes with every start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class BootMark:
    """A record about the data file: the boot in which it was last open, its state, and a count of crashes.

    *num_crashes* counts the processes in a row that have crashed while they had the file open.
    """

    boot_id: str
    state: FileState
    layout: str = _LAYOUT
    num_crashes: int = 0

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return what *folder* records about the data file; None if it has no record, or both copies are damaged.

        Raises OSError if the file cannot be read.
        """
        try:
            with open(folder / _NAME, "rb", opener=open_private) as file:
                content = file.read(_COPIES_AT[-1] + _COPY_BYTES)
        except FileNotFoundError:
            return None
        for start in _COPIES_AT:
            mark = cls._unpack(content[start : start + _COPY_BYTES])
            if mark is not None:
                return mark
        return None

    def write(self, folder: Path) -> None:
        """Write this record of the data file's state to *folder* durably.

        After a machine crash during the write, `read` may return the old record or the new one. So call this only while
        both records are true of the data file. The record is overwritten in place, so that a store can be opened and
        closed on a full disk.
        """
        is_new = not (folder / _NAME).exists()
        with open(folder / _NAME, "r+b", opener=open_or_make) as file:
            file.write(self._pack().ljust(_COPIES_AT[1]) + self._pack())
            file.flush()
            fsync(file.fileno())
        if is_new:
            sync_folder(folder)

    @property
    def is_of_another_layout(self) -> bool:
        """True if another version of the program wrote the data file, in a format that this version cannot read."""
        return self.layout != _LAYOUT

    @property
    def saw_crash(self) -> bool:
        """True if the machine went down while the data file was open."""
        return self.state is not FileState.CLEAN and self.boot_id != current_boot_id()

    def _pack(self) -> bytes:
        facts = "\n".join((self.layout, self.boot_id, self.state, str(self.num_crashes))).encode()
        return (facts + b"\n" + _checksum(facts)).ljust(_COPY_BYTES - 1) + b"\n"

    @classmethod
    def _unpack(cls, copy: bytes) -> Self | None:
        *facts, checksum = (copy.split(b"\n", 5) + [b""] * 5)[:5]
        if checksum.strip() != _checksum(b"\n".join(facts)):
            return None
        layout, boot_id, state, num_crashes = (fact.decode() for fact in facts)
        return cls(boot_id, FileState(state), layout, int(num_crashes))


def _checksum(facts: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(facts).encode()
