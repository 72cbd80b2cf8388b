"""One process owns a store's folder."""

import fcntl
import os
from pathlib import Path


class StoreInUse(OSError):
    """Another process has the store open."""


class OwnerLock:
    """Holds `owner.lock` in *folder* (with this process's pid in it) until `release`, or the process ends.

    `flock`, so kill -9 frees it and no stale file can bar the way. StoreInUse if another has it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "owner.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.read(self._file, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise StoreInUse(
                f"store {folder} is open in process {pid}; stop it, or give this one a folder of its own"
            ) from error
        os.ftruncate(self._file, 0)
        os.write(self._file, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Let others in; the file stays, removing it would let two owners lock two files."""
        os.close(self._file)
