"""Crash counts: how many processes in a row have crashed while they had a store open.

The count is in the store's boot mark, a small file that records the state of the store's files. A damaged page of the
index may crash every process that reads it, or trap it in an endless loop, at every start. So `data_file` starts with
an empty store if the count is too high. Closing the store properly resets the count to 0.
"""

import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvtier.store.folder import Folder
from kvtier.store.lmdb.boot_mark import BootMark
from kvtier.store.owner_lock import OwnerLock

# SIGKILL is not included, because it comes from outside the process.
_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


def signal_of(status: int | None) -> str:
    """Return the name of the signal that crashed a process with the exit *status*, or "" if it did not crash."""
    return next((crash.name for crash in _SIGNALS if status == -crash), "")


def is_computing(pid: int) -> bool:
    """Return whether a thread of the process *pid* is running, instead of waiting (for a disk, for example)."""
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            if task.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


def note(path: Path, owner: int) -> int:
    """Count a crash of the process that had the store at *path* open, and return the number of crashes in a row.

    The count is in the boot mark, a small file in which the store records its state. Raises OSError if that file cannot
    be written, or if another process has opened the store in the meantime.
    """
    with Folder(path) as folder:
        lock = OwnerLock(folder, owner)
        try:
            mark = BootMark.read(folder.here)
            if mark is None:
                return 0
            mark = replace(mark, num_crashes=mark.num_crashes + 1)
            mark.write(folder.here)
            return mark.num_crashes
        finally:
            lock.release()
