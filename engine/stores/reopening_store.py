"""ReopeningStore: a store that is opened by a thread, and anew when its folder is gone, while the engine serves."""

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

FIRST_REST_S = 1.0  # after an attempt to open the store; doubles with each that fails …
MAX_REST_S = 60.0  # … up to this
WATCH_S = 1.0  # how often the thread looks whether the folder is still there
_END_TIMEOUT_S = 10.0  # for the thread to end, after its process has


class NotOpen(StrEnum):
    """Why a store is not open."""

    OPENING = "opening"  # it may be slow, or hang
    IN_USE = "in_use"  # by another process
    READ_ONLY = "read_only"
    FORBIDDEN = "forbidden"
    NO_SPACE = "no_space"
    DIED = "died"  # the process that was to open it
    GONE = "gone"  # its folder was removed or replaced, and it is not open again
    FAILED = "failed"  # anything else

    @classmethod
    def of(cls, error: Exception) -> "NotOpen":
        """The reason that an error of opening stands for."""
        if isinstance(error, FolderInUse):
            return cls.IN_USE
        if isinstance(error, StoreDied):
            return cls.DIED
        number = error.errno if isinstance(error, OSError) else None
        return cls.FAILED if number is None else _REASONS.get(number, cls.FAILED)


_REASONS = {
    errno.EROFS: NotOpen.READ_ONLY,
    errno.EACCES: NotOpen.FORBIDDEN,
    errno.EPERM: NotOpen.FORBIDDEN,
    errno.ENOSPC: NotOpen.NO_SPACE,
    errno.EDQUOT: NotOpen.NO_SPACE,
}


@dataclass(frozen=True, slots=True)
class StoreStanding:
    """A `ReopeningStore` at one moment, by value."""

    folder: Path
    not_open: NotOpen | None  # None: it is open
    why: str = ""  # one line that says why it is not open
    num_gone: int = 0  # times that the folder was removed or replaced under it
    num_restarts: int = 0  # of its process
    num_ended: int = 0  # processes that have ended by themselves, or hung and were killed
    why_ended: str = ""  # the last of them


class ReopeningStore:
    """A `BlobStore`: a `StoreProcess` that a thread of its own opens, and tries to open again until that succeeds.

    While the store is not open every call raises `StoreUnavailable` at once. When the folder is removed or replaced
    under the open store, its process is killed, since what it writes is nowhere any more, and the store is opened anew.
    `statistics` are as they were after the last change, and wait for nothing.
    """

    def __init__(
        self,
        settings: StoreSettings,
        memories: Sequence[SharedMemory] = (),
        rest: Callable[[threading.Event, float], bool] = threading.Event.wait,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """*rest* waits for the event, so many seconds at most, and returns whether the event came. *timeout_s*: of
        silence, after which the process is killed that was to answer."""
        self.settings = settings
        self._memories = memories
        self._timeout_s = timeout_s
        self._closing = threading.Event()
        self._rest = partial(rest, self._closing)
        self._attempted = threading.Event()
        self._lock = threading.Lock()  # guards the next six
        self._process = StoreProcess(
            settings, memories, timeout_s
        )  # open, or being opened, or one that could not be opened
        self._num_openings = 0
        self._not_open: NotOpen | None = NotOpen.OPENING
        self._why = "it is still being opened"
        self._num_gone = 0
        self._before = (0, 0)  # restarts and ends of processes before this one
        self._refreshing = threading.Lock()  # guards the next
        self._statistics = _empty(settings.capacity_bytes)
        self._thread = threading.Thread(target=self._keep_open, name="kvtier-store-opener", daemon=True)
        self._thread.start()

    def wait_opened(self, timeout_s: float) -> bool:
        """Wait until the store is open or cannot be opened for now; whether it is open."""
        self._attempted.wait(timeout_s)
        return self.opening() != 0

    def opening(self) -> int:
        """The number of the opening that lasts now, 0 while the store is not open. Each may have content of its own."""
        with self._lock:
            return self._num_openings if self._not_open is None else 0

    def standing(self) -> StoreStanding:
        """Whether it is open, and what became of its processes; waits for nothing."""
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
        """Open no process any more, and end at once one that is being opened; for an owner that is about to close."""
        self._closing.set()
        with self._lock:
            process = self._process
        process.stop_opening()

    def kill(self) -> None:
        """End the store's process at once, whatever it is doing. What was put so far is whole."""
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
                raise StoreUnavailable(f"store {self.settings.folder}: not open: {self._why}")
            return self._process

    def _refresh(self, process: StoreProcess) -> None:
        with self._refreshing:  # so that a later one is never followed by an earlier one
            self._statistics = process.statistics()

    def _keep_open(self) -> None:
        """Run the thread: open the store, and again when that failed or its folder is gone, until told to stop."""
        rest_s = FIRST_REST_S
        while not self._closing.is_set():
            try:
                folder = self._open()
            except Exception as error:  # a thread's top: `standing` tells of it
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
        """Open the store; its folder, held. Raises what opening raises."""
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
            self._not_open, self._why = NotOpen.of(error), _in_one_line(error)
        self._process.close()
        self._attempted.set()

    def _watch(self, folder: "_Folder") -> bool:
        """Watch the folder until the thread is to stop: True. If the folder is gone before, kill the process: False."""
        with folder:
            while folder.is_there():
                if self._rest(WATCH_S):
                    return True
        with self._lock:
            self._num_gone += 1
            self._not_open, self._why = NotOpen.GONE, "its folder was removed or replaced"
        self._process.kill()
        return False

    def _begin_again(self) -> None:
        """Put a new process in the place of the one that was told to stop."""
        with self._lock:
            restarts, ended = self._before
            self._before = restarts + max(0, self._process.num_starts - 1), ended + self._process.num_ended
            if not self._closing.is_set():
                self._process = StoreProcess(self.settings, self._memories, self._timeout_s)


class _Folder:
    """The folder that a store is open in: held, so that no other folder gets its inode number meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._lock = os.stat(LOCK_FILE, dir_fd=self._file)
        except BaseException:
            self.close()
            raise

    def is_there(self) -> bool:
        """Whether the path still leads to the folder, and the file that the store's process has locked is in it."""
        try:
            return samestat(os.stat(self._path), os.fstat(self._file)) and samestat(
                os.stat(LOCK_FILE, dir_fd=self._file), self._lock
            )
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # an error of the medium says nothing about the folder
            return True

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _empty(capacity_bytes: int) -> StoreStatistics:
    return StoreStatistics(0, 0, capacity_bytes, 0, 0, 0, 0, 0, 0, {}, {})


def _in_one_line(error: Exception) -> str:
    text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
