"""Durability levels: which failures the records of a store survive."""

from enum import StrEnum


class Durability(StrEnum):
    """Durability level of a store: which completed changes survive which failure.

    No level ever returns wrong bytes. The levels differ in what is lost.

    PROCESS   Every completed change survives kill -9, because the kernel holds the written pages: LMDB writes through a
              mapped file (`writemap`, 1.2 to 1.8 times the speed of pwrite) and never syncs. After a machine crash the
              file may be damaged anywhere, so the store starts empty and logs why.
    INTERVAL  As PROCESS, plus a checkpoint every few seconds: the file is synced, and a copy of its root (the two pages
              that lead to all others) is saved (`checkpoint.py`). After a machine crash the store is restored to the
              last checkpoint.
    COMMIT    Every completed change survives a machine crash, because LMDB writes and syncs before the change returns.
              It does not use `writemap`, which would sync page by page and is slower here.
    """

    PROCESS = "process"
    INTERVAL = "interval"
    COMMIT = "commit"

    @property
    def is_mapped(self) -> bool:
        """True if LMDB writes through a memory map and never syncs, so that the store itself decides when to sync."""
        return self is not Durability.COMMIT
