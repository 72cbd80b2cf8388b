"""`OwnerLock`: the lock that makes one process the owner of a folder."""

import fcntl
import os
import time
from pathlib import Path

from kvtier.store.folder import Folder, open_private

LOCK_FILE = "owner.lock"
# How long to wait for the lock of an owner that has ended. The store's process that the owner started may still be
# writing, and then it still holds the lock.
_PATIENCE_S = 10.0


class FolderInUse(OSError):
    """Error raised if another process has the folder open. The message names that process and says what to do."""


class OwnerLock:
    """A lock that reserves *folder* for one process, held until `release` or the end of the process.

    The lock is a `flock` on the file `owner.lock`. The kernel releases it even after kill -9, so the next process can
    lock a file that was left over. The file contains a pid for the messages of other processes: *owner*, or this
    process's pid if *owner* is None. A store's process passes the pid of the engine that started it. Raises FolderInUse
    if another process holds the lock.
    """

    def __init__(self, folder: Folder, owner: int | None = None) -> None:
        self._file = open_private(folder.here / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        try:
            self._acquire(folder.name)
            os.pwrite(self._file, f"{owner or os.getpid():<20}\n".encode(), 0)
        except BaseException:
            os.close(self._file)
            raise

    def _acquire(self, folder: Path) -> None:
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                pid = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
                if _is_alive(pid) or time.monotonic() > give_up_at:
                    raise FolderInUse(
                        f"folder {folder} is open in process {pid}; stop it, or give this one a folder of its own"
                    ) from error
                time.sleep(0.02)

    def release(self) -> None:
        """Release the lock. The file stays: if it were removed, two processes could each lock a different file."""
        os.close(self._file)


def _is_alive(pid: str) -> bool:
    """Return whether the process *pid* exists and has not ended. Text that is not a pid counts as alive."""
    try:
        status = Path(f"/proc/{int(pid)}/stat").read_text()
    except ValueError:
        return True
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
