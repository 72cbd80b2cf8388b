"""ReopeningStore: a disk store that a background thread opens, and opens again if its folder was removed."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from os.path import samestat
from pathlib import Path
from typing import Self

from kvtier.store.blob_store import Blob, Evicted, StoreStatistics, StoreUnavailable
from kvtier.store.owner_lock import LOCK_FILE, FolderInUse
from kvtier.store.process.channel import SharedMemory
from kvtier.store.process.store_process import TIMEOUT_S, StoreDied, StoreProcess
from kvtier.store.record import Fault
from kvtier.store.store_settings import StoreSettings

FIRST_REST_S = 1.0  # after a failed attempt to open the store; doubles with each further failure …
MAX_REST_S = 60.0  # … up to this
WATCH_S = 1.0  # how often the thread checks that the folder still exists
_END_TIMEOUT_S = 10.0  # for the thread to end after its process has ended


class WhyClosed(StrEnum):
    """The reason why a store is not open."""

    OPENING = "opening"  # opening may be slow, or hang
    IN_USE = "in_use"  # another process uses the folder
    READ_ONLY = "read_only"
    FORBIDDEN = "forbidden"
    NO_SPACE = "no_space"
    DIED = "died"  # the process that was to open it died
    GONE = "gone"  # its folder was removed or replaced, and it is not open again
    FAILED = "failed"  # any other reason

    @classmethod
    def of(cls, error: Exception) -> "WhyClosed":
        """Return the reason that fits an error raised while the store was being opened."""
        if isinstance(error, FolderInUse):
            return cls.IN_USE
        if isinstance(error, StoreDied):
            return cls.DIED
        number = error.errno if isinstance(error, OSError) else None
        return cls.FAILED if number is None else _REASONS.get(number, cls.FAILED)


_REASONS = {
    errno.EROFS: WhyClosed.READ_ONLY,
    errno.EACCES: WhyClosed.FORBIDDEN,
    errno.EPERM: WhyClosed.FORBIDDEN,
    errno.ENOSPC: WhyClosed.NO_SPACE,
    errno.EDQUOT: WhyClosed.NO_SPACE,
}


@dataclass(frozen=True, slots=True)
class StoreStanding:
    """State of a `ReopeningStore` at one moment."""

    folder: Path
    not_open: WhyClosed | None  # None if it is open
    why: str = ""  # one line that says why it is not open
    num_gone: int = 0  # how often the folder was removed or replaced while the store was open
    num_restarts: int = 0  # how often the store's process was started again
    num_ended: int = 0  # store processes that ended by themselves, or hung and were killed
    why_ended: str = ""  # why the last of these processes ended


class ReopeningStore:
    """A `BlobStore` in a process of its own, which a thread opens while the engine already serves.

    If opening fails, the thread tries again. Until the store is open, calls raise `StoreUnavailable` at once. If the
    folder is removed or replaced while the store is open, further writes would be lost. So the store's process is
    killed, and the store is opened again. `statistics` returns the latest known counts, so it does not block.
    """

    def __init__(
        self,
        settings: StoreSettings,
        memories: Sequence[SharedMemory] = (),
        rest: Callable[[threading.Event, float], bool] = threading.Event.wait,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Start to open the store.

        *rest* is called as `rest(event, seconds)` to wait, like `Event.wait`, and returns whether the event is set. A
        store process that does not answer within *timeout_s* seconds is killed.
        """
        self.settings = settings
        self._memories = memories
        self._timeout_s = timeout_s
        self._closing = threading.Event()
        self._rest = partial(rest, self._closing)
        self._attempted = threading.Event()
        self._lock = threading.Lock()  # guards the next six attributes
        # The process that is open or being opened, or whose opening failed.
        self._process = StoreProcess(settings, memories, timeout_s)
        self._num_openings = 0
        self._not_open: WhyClosed | None = WhyClosed.OPENING
        self._why = "it is still being opened"
        self._num_gone = 0
        self._before = (0, 0)  # restarts and ends of earlier processes
        self._refreshing = threading.Lock()  # guards `_statistics`
        self._statistics = _empty(settings.capacity_bytes)
        self._thread = threading.Thread(target=self._keep_open, name="kvtier-store-opener", daemon=True)
        self._thread.start()

    def wait_opened(self, timeout_s: float) -> bool:
        """Wait at most *timeout_s* seconds for the first attempt to open the store; return whether it is open."""
        self._attempted.wait(timeout_s)
        return self.opening() != 0

    def opening(self) -> int:
        """Return how often the store has been opened so far, or 0 while it is not open.

        If the number has increased, the store was opened again and may have a different content.
        """
        with self._lock:
            return self._num_openings if self._not_open is None else 0

    def standing(self) -> StoreStanding:
        """Return whether the store is open, and how often its process ended or was restarted. Does not block."""
        with self._lock:
            process, (restarts, ended) = self._process, self._before
            return StoreStanding(
                self.settings.folder,
                self._not_open,
                self._why,
                self._num_gone,
                restarts + max(0, process.num_starts - 1),
                ended + process.num_ended,
                process.why_ended,
            )

    def contains(self, key: bytes) -> bool:
        return self._open_process().contains(key)

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        process = self._open_process()
        evicted = process.put_many(blobs)
        self._refresh(process)
        return evicted

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        return self._open_process().read_many(keys, outs)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._open_process().touch(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        process = self._open_process()
        num_deleted = process.delete(keys)
        self._refresh(process)
        return num_deleted

    def evict(self, num_bytes: int, limit: int, tenant: bytes = b"") -> Evicted:
        process = self._open_process()
        evicted = process.evict(num_bytes, limit, tenant)
        self._refresh(process)
        return evicted

    def keys(self) -> Iterator[bytes]:
        return self._open_process().keys()

    def verify(self) -> Iterator[tuple[bytes, Fault | None]]:
        return self._open_process().verify()

    def sync(self) -> None:
        self._open_process().sync()

    def statistics(self) -> StoreStatistics:
        return self._statistics

    def check(self) -> None:
        self._open_process().check()

    def stop_opening(self) -> None:
        """Start no more processes, and end at once a process that is still opening the store.

        If `close` will be called soon, call this first, so that nothing waits for the store to open.
        """
        self._closing.set()
        with self._lock:
            process = self._process
        process.stop_opening()

    def kill(self) -> None:
        """Kill the store's process at once, whatever it is doing. Records that were stored before stay intact."""
        self._closing.set()
        with self._lock:
            process = self._process
        process.kill()

    def close(self) -> None:
        self.stop_opening()
        self._process.close()
        self._thread.join(_END_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open_process(self) -> StoreProcess:
        with self._lock:
            if self._not_open is not None:
                raise StoreUnavailable(f"store {self.settings.folder} is not open: {self._why}")
            return self._process

    def _refresh(self, process: StoreProcess) -> None:
        with self._refreshing:  # so that older statistics never replace newer ones
            self._statistics = process.statistics()

    def _keep_open(self) -> None:
        """Open the store, and open it again after a failure or the loss of its folder, until the thread must stop."""
        rest_s = FIRST_REST_S
        while not self._closing.is_set():
            try:
                folder = self._open()
            except Exception as error:  # the top of a thread; `standing` reports the error
                self._on_failure(error)
                if self._rest(rest_s):
                    return
                rest_s = min(2 * rest_s, MAX_REST_S)
            else:
                rest_s = FIRST_REST_S
                if self._watch(folder):
                    return
            self._begin_again()

    def _open(self) -> "_Folder":
        """Open the store, and return its folder, which stays open. If opening fails, raise its error."""
        self._process.open()
        folder = _Folder(self.settings.folder)
        try:
            self._refresh(self._process)
        except BaseException:
            folder.close()
            raise
        with self._lock:
            self._num_openings += 1
            self._not_open, self._why = None, ""
        self._attempted.set()
        return folder

    def _on_failure(self, error: Exception) -> None:
        with self._lock:
            self._not_open, self._why = WhyClosed.of(error), _in_one_line(error)
        self._process.close()
        self._attempted.set()

    def _watch(self, folder: "_Folder") -> bool:
        """Watch the folder until the thread must stop, and return True.

        If the folder is removed or replaced meanwhile, kill the store's process and return False.
        """
        with folder:
            while folder.is_there():
                if self._rest(WATCH_S):
                    return True
        with self._lock:
            self._num_gone += 1
            self._not_open, self._why = WhyClosed.GONE, "its folder was removed or replaced"
        self._process.kill()
        return False

    def _begin_again(self) -> None:
        """Replace the stopped process with a new one."""
        with self._lock:
            restarts, ended = self._before
            self._before = restarts + max(0, self._process.num_starts - 1), ended + self._process.num_ended
            if not self._closing.is_set():
                self._process = StoreProcess(self.settings, self._memories, self._timeout_s)


class _Folder:
    """The folder of an open store, held open so that no other folder gets its inode number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._lock = os.stat(LOCK_FILE, dir_fd=self._file)
        except BaseException:
            self.close()
            raise

    def is_there(self) -> bool:
        """Return whether the folder is still at its path and still contains the lock file of the store's process."""
        try:
            return samestat(os.stat(self._path), os.fstat(self._file)) and samestat(
                os.stat(LOCK_FILE, dir_fd=self._file), self._lock
            )
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # an error of the medium is no evidence about the folder
            return True

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _empty(capacity_bytes: int) -> StoreStatistics:
    return StoreStatistics(0, 0, capacity_bytes, 0, 0, 0, 0, 0, {}, {})


def _in_one_line(error: Exception) -> str:
    text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
