"""Durability: which accidents the records of a store survive, in three named levels."""

from enum import StrEnum


class Durability(StrEnum):
    """Which finished changes survive which accident. No level ever gives wrong bytes; they differ in what is lost.

    PROCESS   Every finished change survives kill -9: LMDB maps the file for writing (`writemap`, 1.2 to 1.8 times the
              speed of pwrite) and syncs nothing, the kernel has the pages. After a crash of the machine the file may
              be damaged anywhere, so the store starts empty and says so.
    INTERVAL  As PROCESS, and every few seconds a checkpoint: the file is synced and its root kept (`checkpoint.py`).
              After a crash of the machine the store is what it was at the last checkpoint.
    COMMIT    Every finished change survives a crash of the machine: LMDB writes and syncs before it returns (no
              `writemap`, which would sync page by page and is slower here).
    """

    PROCESS = "process"
    INTERVAL = "interval"
    COMMIT = "commit"

    @property
    def is_mapped(self) -> bool:
        """Whether LMDB writes through its map and never syncs by itself: the store decides when to sync."""
        return self is not Durability.COMMIT
