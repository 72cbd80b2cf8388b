"""Counts crashes of a store's process, which a damaged index may have caused, in the boot mark.

A damaged page may crash a process that reads it, or send it round in a circle, at every start anew. `data_file` starts
an empty store when the counter is too high; a clean end sets it to 0.
"""

import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvtier.store.folder import Folder
from kvtier.store.lmdb.boot_mark import BootMark
from kvtier.store.owner_lock import OwnerLock

# SIGKILL is not among them: it comes from outside.
_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


def signal_of(status: int | None) -> str:
    """Name of the signal by which a process with the exit *status* crashed; "" if it ended in another way."""
    return next((crash.name for crash in _SIGNALS if status == -crash), "")


def is_computing(pid: int) -> bool:
    """Whether a thread of the process *pid* runs now. One that waits for a disk, or was stopped, does not."""
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            if task.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


def note(path: Path, owner: int) -> int:
    """Count a crash of the process that had the store at *path* open, and return how many in a row there are now.

    OSError if the mark cannot be written, or another process has opened the store since.
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
